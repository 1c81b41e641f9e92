"""Cold seconds from a module to its first gradients, and of a second length of the same model, beside torch.compile.

Every measurement is a process of its own with empty directories for caches and temporary files; the peers take turns,
and the table shows medians. "First step" is the whole wait: ``add_tvm_dispatch`` (or ``torch.compile``) and the first
forward and backward, with the import of the compiler; "second length" the same for another length, in the same process.
The time of ``import bridge`` is shown separately.

    python -m benchmarks compile_time --runs 3 --json compile_time.json
    python -m benchmarks compile_time --runs 3 --only "LayerNorm-LSTM" --threads 2    # loops of 100 and of 1,000 steps
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

from benchmarks.cold_processes import cold, options_of, print_table

LOOPS = ("LayerNorm-LSTM (64, 100 steps, 512)", "LayerNorm-LSTM (64, 1000 steps, 512)")
"""Measured without torch.compile, which unrolls the steps: it did not finish 100 of them in four minutes."""

NAMES = ("BertLayer (1, 128)", "BERT-base (1, 128)", "GPT-2 small (1, 128)", *LOOPS)
PEERS = ("ours", "torch_compile")

Seconds = dict[str, float]


def measure(peer: str, name: str, quick: bool) -> Seconds:
    """Seconds of each part, in this process."""
    import torch

    from benchmarks.models import MODELS, loss_of

    model = MODELS[name]
    torch.manual_seed(0)
    module = model.make(quick)
    batches = [model.sample(module, quick, which) for which in (0, 1)]
    started = time.perf_counter()
    if peer == "ours":
        import bridge
    seconds = {"import": time.perf_counter() - started}

    def step(run: Callable[..., Any], batch: dict[str, Any]) -> None:
        loss_of(run(**batch)).backward()

    run = module if peer == "ours" else torch.compile(module)
    for part, batch in zip(("first", "second_length"), batches, strict=True):
        started = time.perf_counter()
        if peer == "ours":
            bridge.add_tvm_dispatch(module, batch)
            seconds[f"{part}_add"] = time.perf_counter() - started
        step(run, batch)
        seconds[part] = time.perf_counter() - started
    started = time.perf_counter()
    step(run, batches[0])
    seconds["later"] = time.perf_counter() - started
    if peer == "ours" and (counted := bridge.stats(module)).hits != 3:
        raise RuntimeError(f"not every step was dispatched: {counted}")
    return seconds


def row_of(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Medians of alternating cold runs."""
    peers = PEERS[:1] if options.no_inductor or name in LOOPS else PEERS
    runs: dict[str, list[Seconds]] = {peer: [] for peer in peers}
    for _ in range(options.runs):
        for peer in peers:
            runs[peer].append(cold("compile_time", name, ["--peer", peer], options.quick, options.threads))
    row: dict[str, Any] = {"module": name}
    for peer, measured in runs.items():
        row.update({f"{peer}_{part}_s": statistics.median(run[part] for run in measured) for part in measured[0]})
    return row


def main() -> None:
    parser = options_of(__doc__, "cold processes per number")
    parser.add_argument("--no-inductor", action="store_true", help="leave torch.compile out")
    parser.add_argument("--peer", choices=PEERS, help="measure in this process and print JSON")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    names = [name for name in NAMES if options.only in name]
    if options.peer:
        print(json.dumps(measure(options.peer, names[0], options.quick)))
        return
    print_table("compile_time", "compile", names, row_of, options)


if __name__ == "__main__":
    main()
