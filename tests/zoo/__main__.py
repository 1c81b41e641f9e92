"""``python -m tests.zoo [--only NAME] [--steps N]``: each training script beside eager, with its dispatch counts."""

from __future__ import annotations

import argparse
import sys

import torch

from bridge.base.session import SESSION
from tests.zoo.run import compare, load, names


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=names(), metavar="NAME", help=f"of {', '.join(names())}")
    parser.add_argument("--steps", type=int, default=15, help="steps of each run")
    parser.add_argument("--time", action="store_true", help="ratio of step times (wants --steps 100)")
    parser.add_argument("--float64", action="store_true", help="in float64")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    dtype = torch.float64 if options.float64 else torch.float32
    print("| script | s to add | ours / eager | hits | misses | loss off by | state off by | refused |")
    print("|---|---:|---:|---|---:|---:|---:|---|")
    for name in options.only or names():
        SESSION.reset("programs")
        found = compare(load(name).train, options.steps, dtype)
        ratio = f"{found.ratio:.2f}" if options.time else "-"
        hits = ", ".join(f"{count} {module}" for module, count in found.hits.items()) or "-"
        refused = "; ".join(f"{module}: {' '.join(words.split())}" for module, words in found.refusals.items())
        missed = [f"{count} x {reason}" for reason, count in found.misses.items()]
        notes = "; ".join([refused[:300], *missed, *([] if found.generator else ["GENERATOR"])]).strip("; ") or "-"
        print(
            f"| {name} | {found.seconds:.1f} | {ratio} | {hits} | {found.misses.total()} | {found.loss:.1e} "
            f"| {found.state:.1e} | {notes} |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
