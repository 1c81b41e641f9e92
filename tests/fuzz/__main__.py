"""``python -m tests.fuzz --count 500 --seed 0``: random modules beside eager; the verdict of each, and every bug."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from functools import partial

from tests.device import DEVICE
from tests.fuzz.check import check
from tests.fuzz.dynamic import check_dynamic
from tests.fuzz.generate import generate
from tests.fuzz.loops import check_loop, generate_loop
from tests.fuzz.placed import placed
from tests.fuzz.run import run_seeds
from tests.fuzz.shrink import shrink
from tests.fuzz.state import check_state, generate_state
from tests.fuzz.verdict import Verdict


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=500, help="number of programs")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first one; the others count up")
    parser.add_argument("--dynamic", action="store_true", help="some sizes of the arguments vary (tests/fuzz/sizes.py)")
    parser.add_argument("--automatic", action="store_true", help="likewise, and calls that miss find out which")
    parser.add_argument("--everywhere", action="store_true", help="likewise, at two dozen sizes far from the sample's")
    parser.add_argument("--loops", action="store_true", help="modules with loops over time (tests/fuzz/loops.py)")
    parser.add_argument("--state", action="store_true", help="Python state changes between calls (tests/fuzz/state.py)")
    parser.add_argument("--show", type=int, metavar="SEED", help="print the program of a seed and its verdict")
    parser.add_argument("--shrink", action="store_true", help="print a smaller program for each bug")
    parser.add_argument("--verbose", action="store_true", help="print every verdict")
    parser.add_argument("--jobs", type=int, help="processes; one that dies costs one program")
    parser.add_argument("--seconds-per-program", type=float, default=300.0, help="then it is a crash, with --jobs")
    options = parser.parse_args(argv)
    make = generate_loop if options.loops else generate_state if options.state else generate
    if options.show is not None:
        print(placed(make(options.show).source, DEVICE))
    judge = check_loop if options.loops else check_state if options.state else check
    if options.dynamic or options.automatic or options.everywhere:
        kind = "automatic" if options.automatic else None
        judge = partial(check_dynamic, kind=kind, far=options.everywhere)
    seeds = range(options.seed, options.seed + options.count) if options.show is None else [options.show]
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    started = time.perf_counter()

    def report(seed: int, verdict: Verdict) -> None:
        counts[verdict.status] += 1
        if verdict.status == "refused":
            reasons.update(part.split(": ")[0] for part in verdict.detail.split("; "))
        shown = verdict.is_bug or verdict.lost or verdict.status == "imprecise"
        if shown or options.verbose or options.show is not None:
            print(f"{seed:>6} {verdict.status}: {verdict.detail}", flush=True)
        if verdict.is_bug and options.shrink and not options.state:
            smaller, detail = shrink(make(seed), verdict, judge)
            print(f"{smaller.source.partition('class Random')[2]}\n{detail}\n", flush=True)

    run_seeds(seeds, judge, report, make=make, jobs=options.jobs, seconds=options.seconds_per_program)
    seconds = time.perf_counter() - started
    print(", ".join(f"{count} {status}" for status, count in counts.most_common()), f"in {seconds:.0f} s")
    for reason, count in reasons.most_common(20):
        print(f"  refused {count:>4} x {reason}")
    if counts.total() < len(seeds):
        print(f"{len(seeds) - counts.total()} not tried: the GPU is lost to this process; --jobs starts another")
        return 2
    return 1 if counts["wrong"] or counts["crash"] else 0


if __name__ == "__main__":
    sys.exit(main())
