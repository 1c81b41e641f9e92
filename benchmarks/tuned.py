"""Common training blocks before and after some minutes of tuning each: eager, ours by default, ours tuned, by turns.

The table has one process for each block: its tuning, then rounds in which all three take turns on copies of the same
module. Below it, the tuned choices.

    python -m benchmarks tuned --minutes 2 --log tuned.jsonl --json benchmarks/results/tuned.json

Choices go into a cache of this run, not into the user's, unless ``--cache`` names one. With ``--log``, an interrupted
run continues.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import tempfile
import warnings
from functools import partial
from pathlib import Path

import torch

from benchmarks.results import Results, Row, machine, versions
from benchmarks.tables import FORMS, header, line
from benchmarks.train_blocks import BLOCKS, WARM_UP, step
from bridge import TuningResult, add_tvm_dispatch, stats, tune


def measure(name: str, minutes: float, rounds: int, log: Path | None) -> tuple[Row, TuningResult]:
    """A row of the table, and the result of the tuning."""
    make, shape = BLOCKS[name]
    torch.manual_seed(0)
    eager = make().train()
    x, grad = torch.randn(shape, requires_grad=True), torch.randn(shape)
    before, after = copy.deepcopy(eager), copy.deepcopy(eager)
    add_tvm_dispatch(before, x)
    found = tune(after, x, minutes=minutes, log=log)
    add_tvm_dispatch(after, x)
    peers = {"eager": eager, "before": before, "after": after}
    runs = {peer: partial(step, module, x, grad) for peer, module in peers.items()}
    times: dict[str, list[float]] = {peer: [] for peer in runs}
    for _ in range(rounds + WARM_UP):
        for peer, run in runs.items():
            times[peer].append(run())
    assert not stats(after).misses and not stats(before).misses
    medians = {f"{peer}_ms": 1e3 * statistics.median(values[WARM_UP:]) for peer, values in times.items()}
    return {"block": name, **medians, "trials": found.trials, "kept": "yes" if found.kept else "no"}, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="blocks whose name contains this")
    parser.add_argument("--minutes", type=float, default=2.0, help="of tuning, for each block (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--threads", type=int, metavar="N", help="torch.set_num_threads(N)")
    parser.add_argument("--log", type=Path, help="trials, to go on with after an interruption")
    parser.add_argument("--cache", type=Path, help="a cache directory (default: one that is removed in the end)")
    parser.add_argument("--quick", action="store_true", help="the smallest block, one candidate: does it work")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, too")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.quick:
        options.only, options.rounds, options.minutes = options.only or "BertLayer (1, 14)", 2, 1e-3
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"BRIDGE_CACHE": "1", "BRIDGE_CACHE_DIR": str(options.cache or folder)}
        _print_table(options)


def _print_table(options: argparse.Namespace) -> None:
    print(f"forward + backward, float32, {options.minutes:g} minutes of tuning each; {versions()}; {machine()}\n")
    columns = FORMS["tuned"]
    print(header(columns))
    rows, told = [], []
    for name in BLOCKS:
        if options.only in name:
            row, found = measure(name, options.minutes, options.rounds, options.log)
            rows.append(row)
            told.append(f"{name}: {found}")
            print(line(columns, row), flush=True)
    print("", *told, sep="\n")
    if options.json:
        given = [f"--{key} {getattr(options, key)}" for key in ("minutes", "only", "threads") if getattr(options, key)]
        command = " ".join(["python -m benchmarks tuned", *given])
        Results.of("tuned", command, rows).save(options.json)


if __name__ == "__main__":
    main()
