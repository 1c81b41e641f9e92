"""Run a suite of the parity sweep and write one row per case.

    python -m tests.sweep --suite opinfo --out opinfo.csv
    python -m tests.sweep --suite zoo --out zoo.csv --only 'bert|gpt2' --jobs 2
    python -m tests.sweep --suite moduleinfo --out batches.csv --dynamic 0
    TEST_DEVICE=cuda python -m tests.sweep --suite opinfo --out recorded.csv --recorded
    python -m tests.sweep --suite opinfo --out third.csv --slice 2/5       # the third of five equal parts

The exit status is 1 if any case is a ``mismatch`` or an ``error``. A refusal is no failure: it names its operators.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import importlib
import inspect
import os
import pathlib
import re
import sys
from collections import Counter

from tqdm import tqdm

from tests.device import DEVICE
from tests.sweep.check import Outcome
from tests.sweep.worker import SUITES, Settings, run_cases

COLUMNS = ("suite", *(field.name for field in dataclasses.fields(Outcome)))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.sweep", description=__doc__.partition("\n")[0])
    parser.add_argument("--suite", choices=sorted(SUITES), required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="the CSV file; rows appear as cases end")
    parser.add_argument("--only", metavar="REGEX", default="", help="cases whose name has a match")
    parser.add_argument("--slice", type=_slice, metavar="I/N", default=(0, 1), help="every Nth case, from the Ith on")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default %(default)s)")
    parser.add_argument("--samples", type=int, default=4, help="samples per case at most (default %(default)s)")
    parser.add_argument("--seconds-per-case", type=float, default=120.0, help="then it is an error")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--dynamic",
        type=int,
        metavar="DIM",
        help="compile for all sizes of this dimension and compare two others",
    )
    parser.add_argument(
        "--recorded", action="store_true", help="on a GPU: more calls of each, as recorded graphs where they can be"
    )
    parser.add_argument("--list", action="store_true", help="print the names of the cases and run nothing")
    return parser.parse_args(arguments)


def _slice(text: str) -> tuple[int, int]:
    """``"2/5"``: part number 2, counted from 0, of five equal parts."""
    first, _, parts = text.partition("/")
    if not (first.isdigit() and parts.isdigit() and int(first) < int(parts)):
        raise argparse.ArgumentTypeError(f"{text!r} is no slice: 0/5 to 4/5 are the five of a fifth each")
    return int(first), int(parts)


def main(arguments: list[str] | None = None) -> int:
    """Runs the selected cases; returns the exit status."""
    options = parse(arguments)
    suite = importlib.import_module(SUITES[options.suite])
    known = inspect.signature(suite.run_case).parameters
    if options.dynamic is not None and "dynamic" not in known:
        print(f"suite {options.suite} has samples of one size only: --dynamic is for the others", file=sys.stderr)
        return 2
    if options.recorded and ("recorded" not in known or DEVICE.type != "cuda"):
        print("--recorded is for suites of operators and modules, on a GPU: TEST_DEVICE=cuda", file=sys.stderr)
        return 2
    first, parts = options.slice
    names = [name for name in suite.names() if re.search(options.only, name)][first::parts]
    if options.list:
        print("\n".join(names))
        return 0
    if not names:
        print(f"no case of suite {options.suite} matches {options.only!r}", file=sys.stderr)
        return 2
    settings = Settings(
        suite=options.suite,
        samples=options.samples,
        seed=options.seed,
        seconds_per_case=options.seconds_per_case,
        dynamic=options.dynamic,
        recorded=options.recorded,
        threads=int(os.environ.get("OMP_NUM_THREADS") or max(1, (os.cpu_count() or 1) // options.jobs)),
    )
    counts: Counter[str] = Counter()
    outcomes: list[Outcome] = []
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("w", newline="") as file, tqdm(total=len(names), unit="case") as progress:
        table = csv.DictWriter(file, COLUMNS)
        table.writeheader()

        def report(outcome: Outcome) -> None:
            table.writerow({"suite": options.suite, **dataclasses.asdict(outcome)})
            file.flush()
            kind = outcome.status.partition("(")[0]
            counts[kind] += 1
            outcomes.append(outcome)
            if kind in ("mismatch", "error"):
                progress.write(f"{kind:8} {outcome.case}: {outcome.detail}")
            progress.set_postfix(counts)
            progress.update()

        run_cases(names, settings, report, jobs=options.jobs)
    for outcome in outcomes:
        if outcome.status.startswith("refused"):
            print(f"{outcome.case}: {outcome.status}")
    if hasattr(suite, "table"):
        print(suite.table(outcomes))
    print(f"{options.suite}: " + ", ".join(f"{n} {kind}" for kind, n in counts.most_common()))
    return 1 if counts["mismatch"] or counts["error"] else 0


if __name__ == "__main__":
    sys.exit(main())
