"""``python -m tests.fuzz --count 500 --seed 0``: random modules beside eager; what became of each, and every bug."""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import sys
import time
from collections import Counter
from functools import partial

import torch

from bridge.compile import clear_cache
from tests.fuzz.check import check
from tests.fuzz.dynamic import check_dynamic
from tests.fuzz.generate import generate
from tests.fuzz.shrink import shrink


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=500, help="number of programs")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first one; the others count up")
    parser.add_argument("--dynamic", action="store_true", help="some sizes of the arguments vary (tests/fuzz/sizes.py)")
    parser.add_argument("--automatic", action="store_true", help="likewise, and calls that miss find out which")
    parser.add_argument("--everywhere", action="store_true", help="likewise, at two dozen sizes far from the sample's")
    parser.add_argument("--show", type=int, metavar="SEED", help="print the program of a seed and its verdict")
    parser.add_argument("--shrink", action="store_true", help="print a smaller program for each bug")
    parser.add_argument("--verbose", action="store_true", help="print every verdict")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    for noisy in ("torch.fx", "torch.export", "torch._export"):  # they print the graph of everything that is refused
        logging.getLogger(noisy).setLevel(logging.CRITICAL)
    if options.show is not None:
        print(generate(options.show).source)
    judge = check
    if options.dynamic or options.automatic or options.everywhere:
        kind = "automatic" if options.automatic else None
        judge = partial(check_dynamic, kind=kind, far=options.everywhere)
    seeds = range(options.seed, options.seed + options.count) if options.show is None else [options.show]
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    started = time.perf_counter()
    for position, seed in enumerate(seeds):
        if position % 20 == 0:
            clear_cache()  # what equal graphs share is worth little here, and it is kept
        program = generate(seed)
        with contextlib.redirect_stderr(io.StringIO()):  # torch.export prints the graph of what it refuses
            verdict = judge(program)
        counts[verdict.status] += 1
        if verdict.status == "refused":
            reasons.update(part.split(": ")[0] for part in verdict.detail.split("; "))
        if verdict.is_bug or options.verbose or options.show is not None:
            print(f"{seed:>6} {verdict.status}: {verdict.detail}", flush=True)
        if verdict.is_bug and options.shrink:
            smaller, detail = shrink(program, verdict, judge)
            print(f"{smaller.source.partition('class Random')[2]}\n{detail}\n", flush=True)
    seconds = time.perf_counter() - started
    print(", ".join(f"{count} {status}" for status, count in counts.most_common()), f"in {seconds:.0f} s")
    for reason, count in reasons.most_common(20):
        print(f"  refused {count:>4} x {reason}")
    return 1 if counts["wrong"] or counts["crash"] else 0


if __name__ == "__main__":
    sys.exit(main())
