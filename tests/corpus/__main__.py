"""A frozen corpus of calls: the results of one tree against another's.

    python -m tests.corpus freeze --out .corpus                       # this tree's results
    python -m tests.corpus compare --with .corpus                     # a later tree's results beside them
    python -m tests.corpus compare --with .corpus --only zoo 'opinfo/fft*' --jobs 2
    python -m tests.corpus compare --with .corpus --diff plain/17     # the differences of one case, as text

Suites: plain, dynamic, loops (seeds of the fuzzer), zoo, moduleinfo, special, opinfo. The 4,000 cases take an hour and
a quarter of a processor: 1.1 s for a plain seed, 2.5 s for a seed of the other two, 6 s for a tiny model, 0.4 s for one
of torch's samples; --count 500 is a quarter of each suite, --jobs 2 halves the time where two processors are free.
Records are lines that are added as cases end: an interrupted freeze continues, and a longer --count adds to a shorter
one; compare does so with --now. Bits and program text depend on the machine: freeze and compare on one.

compare exits 1 if a dispatched case is now refused, wrong (by 1e-10 in float64, by more than rounding in other types)
or raises, hits compiled code in fewer calls, or leaves another generator state. Text of programs, bits within tolerance
and refusals are listed, not judged.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from typing import Any

from tqdm import tqdm

from tests.corpus.compare import Report, text_diff
from tests.corpus.store import IDENTITY, Store, header_of_this_tree
from tests.corpus.suites import FUZZ_SEEDS, chosen
from tests.corpus.work import records


def parse(arguments: list[str] | None) -> argparse.Namespace:
    told: dict[str, Any] = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(prog="python -m tests.corpus", **told)
    commands = parser.add_subparsers(dest="command", required=True)
    freeze = commands.add_parser("freeze", help="write this tree's records", **told)
    freeze.add_argument("--out", type=Path, default=Path(".corpus"), help="the folder (default %(default)s)")
    compare = commands.add_parser("compare", help="this tree's records against a folder's", **told)
    compare.add_argument(
        "--with", type=Path, default=Path(".corpus"), dest="frozen", help="the folder of the other tree"
    )
    compare.add_argument("--now", type=Path, help="keep this tree's records in this folder, and go on with it")
    compare.add_argument("--diff", metavar="CASE", help="print what differs in one case as a unified diff")
    for command in (freeze, compare):
        command.add_argument(
            "--only", nargs="+", default=[], metavar="SUITE", help="suites, or patterns as 'zoo/bert*'"
        )
        command.add_argument("--count", type=int, help=f"fuzz seeds; of all suites that part of {FUZZ_SEEDS}")
        command.add_argument("--seed", type=int, default=0, help="of the first of each fuzz suite")
        command.add_argument("--jobs", type=int, default=1, help="processes (default %(default)s); 0: this one")
        command.add_argument("--seconds-per-case", type=float, default=180.0, help="then it is a crash")
        command.add_argument(
            "--forwards", choices=("some", "all", "none"), default="some", help="cases in which runs of it are counted"
        )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        names = chosen(options.only, FUZZ_SEEDS if options.count is None else options.count, options.seed)
        return _freeze(options, names) if options.command == "freeze" else _compare(options, names)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2


def _run(options: argparse.Namespace, names: list[str], store: Store) -> Counter[str]:
    """Adds the records of the cases that have none yet."""
    store.begin(header_of_this_tree())
    store.mend()
    known = store.names()
    counts: Counter[str] = Counter()
    names = [name for name in names if name not in known]
    tqdm.set_lock(threading.RLock())  # not a lock for processes, which would outlive them
    with tqdm(total=len(names), unit="case", mininterval=5.0, disable=len(names) < 2) as progress:

        def report(record: dict[str, Any]) -> None:
            store.add(record)
            counts[record["status"]] += 1
            progress.set_postfix(counts, refresh=False)
            progress.update()

        how = {"jobs": options.jobs, "seconds": options.seconds_per_case}
        records(names, report, forwards=options.forwards, **how)
    return counts


def _freeze(options: argparse.Namespace, names: list[str]) -> int:
    store = Store(options.out)
    counts = _run(options, names, store)
    told = ", ".join(f"{number} {status}" for status, number in counts.most_common()) or "nothing new"
    print(f"{told}; {options.out} holds {len(store.names())} cases of commit {store.header['commit']}")
    return 0


def _compare(options: argparse.Namespace, names: list[str]) -> int:
    frozen = Store(options.frozen)
    if not frozen.header:
        raise ValueError(f"{options.frozen} holds no corpus: python -m tests.corpus freeze --out {options.frozen}")
    if options.diff is not None:
        names = [options.diff]
    elif not options.only and options.count is None:
        names = [record["case"] for record in frozen]
    known = frozen.names()
    left = [name for name in names if name not in known]
    names = [name for name in names if name in known]
    if not names:
        raise ValueError(f"{options.frozen} has none of these cases")
    with tempfile.TemporaryDirectory() as folder:
        store = Store(options.now or Path(folder) / "now")
        _run(options, names, store)
        return _report(options, names, frozen, store, len(left))


def _report(options: argparse.Namespace, names: list[str], frozen: Store, store: Store, left: int) -> int:
    wanted, report = set(names), Report()
    now = {record["case"]: record for record in store if record["case"] in wanted}
    for before in frozen:
        record = now.get(before["case"])
        if record is None:
            continue
        report.add(record, before)
        if options.diff is not None:
            print(text_diff(record, before))
    here, there = store.header, frozen.header
    for name in IDENTITY[1:]:
        if here[name] != there.get(name):
            print(f"other {name}: {there.get(name)} -> {here[name]}")
    print(f"commit {there['commit']} -> {here['commit']}")
    if left:
        print(f"{left} cases are not in {options.frozen}")
    print(report)
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
