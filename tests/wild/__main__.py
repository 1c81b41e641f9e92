"""Public packages' models, a small one per family, trained some steps beside eager → a table: hits, parts, refusals.

    python -m tests.wild [--out FILE] [TEXT …]     families whose names have one of these texts

One process per family, one at a time, with a time limit. ``--out``: lines of JSON; families that are there already are
not run again. ``make test-wild`` installs the packages in an environment of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
import sys
import time
import traceback
import warnings
from collections import Counter, defaultdict
from pathlib import Path

from bridge.quirks import all_quirks
from tests.wild.compare import verdict_on
from tests.wild.families import Family, families, without_cuda

LIMIT_S = 300
VERDICTS = ("hit", "entries", "parts", "misses", "refused", "WRONG", "CRASH", "left out")
"""Every call a hit; the same with an entry for each size; in parts; some calls misses; refused; wrong numbers; an error
or a signal; not run."""


def in_a_process(family: Family) -> tuple[str, str]:
    """:func:`verdict_on` a family in a fork, which may die or take too long."""
    read, write = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if not child:
        os.close(read)
        signal.alarm(LIMIT_S)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        try:
            found = verdict_on(family)
        except BaseException as error:  # noqa: BLE001 - reported in the table
            traceback.print_exc()
            found = "CRASH", f"{type(error).__name__}: {' '.join(str(error).split())}"
        os.write(write, json.dumps(found).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status):
        verdict, words = json.loads(answer)
        return verdict, words
    number = os.WTERMSIG(status)
    return "CRASH", f"more than {LIMIT_S} s" if number == signal.SIGALRM else signal.Signals(number).name


def table(found: dict[str, tuple[str, str]]) -> str:
    """Counts by package."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for name, (verdict, _) in found.items():
        counts[name.split()[0]][verdict] += 1
    counts["all"] = sum(counts.values(), Counter())
    lines = [f"{'package':24s} tried {' '.join(f'{each:>8s}' for each in VERDICTS)}    hit    in parts"]
    for package, each in counts.items():
        tried = each.total() - each["left out"]
        hits, parts = (sum(map(each.get, names, [0] * 3)) / max(tried, 1) for names in (VERDICTS[:1], VERDICTS[:3]))
        cells = " ".join(f"{each[name]:8d}" for name in VERDICTS)
        lines.append(f"{package:24s} {tried:5d} {cells} {hits:6.1%} {parts:11.1%}")
    return "\n".join(lines)


def main() -> None:
    """Prints a line a family, then the table; exits with 1 where one is wrong or raises."""
    parser = argparse.ArgumentParser(prog="python -m tests.wild", description="public models beside eager")
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="run families whose names have one of these")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write results there, go on from what is there")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    without_cuda()
    all_quirks()  # imports all of this package once, not in each fork
    out = options.out
    found = dict(map(json.loads, out.read_text().splitlines())) if out and out.exists() else {}
    for family in families():
        name = f"{family.package} {family.name}"
        if name in found or (options.texts and not any(text in name for text in options.texts)):
            continue
        with contextlib.suppress(ImportError):
            family.imported()
        began = time.monotonic()
        verdict, words = found[name] = in_a_process(family)
        print(f"{verdict:9s} {name:48s} {time.monotonic() - began:4.0f} s  {words[:200]}", flush=True)
        if out:
            with out.open("a") as file:
                file.write(json.dumps([name, [verdict, words]]) + "\n")
    print(table(found))
    sys.exit(any(verdict in ("WRONG", "CRASH") for verdict, _ in found.values()))


if __name__ == "__main__":
    main()
