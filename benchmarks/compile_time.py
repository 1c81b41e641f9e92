"""Cold seconds from a module to its first gradients, and of a second length of the same model, beside torch.compile.

Every measurement is a process of its own with empty directories for caches and temporary files; ours and theirs take
turns, the table shows medians. "First step" is all that one waits for: ``add_tvm_dispatch`` (or ``torch.compile``) and
the first forward and backward; "second length" the same for another length, in the same process. What ``import bridge``
takes is shown apart; torch.compile imports its compiler inside the first step.

    python -m benchmarks compile_time --runs 3 --json compile_time.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAMES = ("BertLayer (1, 128)", "BERT-base (1, 128)", "GPT-2 small (1, 128)", "LayerNorm-LSTM (64, 100 steps, 512)")
PEERS = ("ours", "torch_compile")
CACHES = ("BRIDGE_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TMPDIR", "XDG_CACHE_HOME")

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


def cold(peer: str, name: str, quick: bool, threads: int | None) -> Seconds:
    """The measurement in a new process whose caches are empty."""
    with tempfile.TemporaryDirectory() as scratch:
        environment = {**os.environ, **({"OMP_NUM_THREADS": str(threads)} if threads else {})}
        for variable in CACHES:
            environment[variable] = str(Path(scratch) / variable.lower())
            Path(environment[variable]).mkdir()
        command = [sys.executable, "-m", "benchmarks.compile_time", "--only", name, "--peer", peer]
        command += ["--quick"] if quick else []
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def row_of(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Medians of alternating cold runs."""
    peers = PEERS[:1] if options.no_inductor else PEERS
    runs: dict[str, list[Seconds]] = {peer: [] for peer in peers}
    for _ in range(options.runs):
        for peer in peers:
            runs[peer].append(cold(peer, name, options.quick, options.threads))
    row: dict[str, Any] = {"module": name}
    for peer, measured in runs.items():
        row.update({f"{peer}_{part}_s": statistics.median(run[part] for run in measured) for part in measured[0]})
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=3, help="cold processes per number (default %(default)s)")
    parser.add_argument("--only", default="", help="modules whose name contains this")
    parser.add_argument("--threads", type=int, help="OpenMP threads of each process (default: as set around it)")
    parser.add_argument("--no-inductor", action="store_true", help="leave torch.compile out")
    parser.add_argument("--quick", action="store_true", help="tiny modules, one run: does it work")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, too")
    parser.add_argument("--peer", choices=PEERS, help="measure in this process and print JSON")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    names = [name for name in NAMES if options.only in name]
    if options.peer:
        print(json.dumps(measure(options.peer, names[0], options.quick)))
        return
    from benchmarks.results import Results, machine, versions
    from benchmarks.tables import FORMS, header, line

    options.runs = 1 if options.quick else options.runs
    print(f"cold processes, float32, medians of {options.runs}; {versions()}; {machine()}\n")
    print(header(FORMS["compile"]))
    rows = []
    for name in names:
        rows.append(row_of(name, options))
        print(line(FORMS["compile"], rows[-1]), flush=True)
    if options.json:
        Results.of("compile_time", "python -m benchmarks compile_time", rows).save(options.json)


if __name__ == "__main__":
    main()
