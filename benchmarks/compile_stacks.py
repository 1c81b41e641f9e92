"""Seconds of compiling equal layers one by one, and stacks of them captured whole, by part; cold, beside torch.compile.

Every measurement is a process of its own with an empty Inductor cache, so that each starts cold; the peers take turns,
and the tables show medians. "first step" is the whole wait: ``add_tvm_dispatch`` (or nothing) and the first forward and
backward, with the import of the compiler. The time of ``import bridge`` is shown separately, and counted in the last
ratio.

    python -m benchmarks.compile_stacks --runs 3
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence

LAYERS = 12
STACKS = (1, 2, 4, 8)
SHAPE = (1, 128, 768)

Seconds = dict[str, float]


def measure_dispatch(layers: int) -> Seconds:
    """BertLayers dispatched one by one, then the first and a later step through all of them."""
    modules, x = _modules(layers)
    started = time.perf_counter()
    from bridge import add_tvm_dispatch, stats

    seconds = {"import": time.perf_counter() - started}
    started = time.perf_counter()
    for module in modules:
        add_tvm_dispatch(module, x)
    seconds["add"] = time.perf_counter() - started
    _step(modules, x)
    seconds["first step"] = time.perf_counter() - started
    seconds["later step"] = _later(modules, x)
    if any(stats(module).misses for module in modules):
        raise AssertionError([stats(module) for module in modules])
    return seconds


def measure_inductor(layers: int) -> Seconds:
    """The same with ``torch.compile`` on every layer."""
    import torch

    modules, x = _modules(layers)
    started = time.perf_counter()
    compiled = [torch.compile(module) for module in modules]
    _step(compiled, x)
    seconds = {"import": 0.0, "first step": time.perf_counter() - started}
    seconds["later step"] = _later(compiled, x)
    return seconds


def measure_stack(layers: int) -> Seconds:
    """Layers captured as one module: the seconds of each part of the compilation."""
    import torch

    from bridge import add_tvm_dispatch, stats

    modules, x = _modules(layers)
    stack = torch.nn.Sequential(*modules)
    started = time.perf_counter()
    add_tvm_dispatch(stack, x)
    seconds = {"add": time.perf_counter() - started}
    entry = stats(stack).entries[0]
    stages = {stage.name: stage.seconds for stage in entry.lowered.stages}
    seconds["capture"] = stages.pop("captured")
    seconds["partition"] = stages.pop("split forward")
    seconds["lower"] = sum(stages.values())
    timings = [program.timings for program in (entry.forward, entry.backward)]
    seconds["LLVM"] = sum(timing["build"] for timing in timings)
    seconds["fuse, generate"] = sum(sum(timing.values()) for timing in timings) - seconds["LLVM"]
    return seconds


def _modules(layers: int) -> tuple[list, object]:
    import torch
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertLayer

    torch.manual_seed(0)
    modules = [BertLayer(BertConfig(attn_implementation="eager")).train() for _ in range(layers)]
    return modules, torch.randn(SHAPE, requires_grad=True)


def _step(modules: Sequence[Callable], x: object) -> None:
    y = x
    for module in modules:
        y = module(y)
        y = y[0] if isinstance(y, tuple) else y
    y.sum().backward()


def _later(modules: Sequence[Callable], x: object) -> float:
    """Seconds of a step after all compilations."""
    times = []
    for _ in range(5):
        started = time.perf_counter()
        _step(modules, x)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


CASES: dict[str, Callable[[int], Seconds]] = {
    "dispatch": measure_dispatch,
    "inductor": measure_inductor,
    "stack": measure_stack,
}


def _cold(case: str, layers: int) -> Seconds:
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": cache}
        command = [sys.executable, "-m", "benchmarks.compile_stacks", "--case", case, "--layers", str(layers)]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _medians(runs: Sequence[Seconds]) -> Seconds:
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    print("| " + " | ".join(header) + " |\n|---" + "|---:" * (len(header) - 1) + "|")
    for row in rows:
        cells = [cell if isinstance(cell, str) else f"{cell:.2f}" for cell in row]
        print("| " + " | ".join(cells) + " |", flush=True)
    print()


def _report_layers(runs: int, inductor: bool) -> None:
    peers = [("ours", "dispatch", 1), (f"ours, {LAYERS} layers", "dispatch", LAYERS)]
    peers += [("torch.compile", "inductor", 1)] if inductor else []
    measured: dict[str, list[Seconds]] = {name: [] for name, *_ in peers}
    for _ in range(runs):
        for name, case, layers in peers:
            measured[name].append(_cold(case, layers))
    medians = {name: _medians(values) for name, values in measured.items()}
    rows = [
        [name, m["import"], m.get("add", 0.0), m["first step"], m["later step"], m["first step"] - m["later step"]]
        for name, m in medians.items()
    ]
    header = ["BertLayer (1, 128)", "import s", "add_tvm_dispatch s", "first step s", "later step s", "difference s"]
    _table(header, rows)
    one, many = medians["ours"], medians[f"ours, {LAYERS} layers"]
    print(f"{LAYERS} layers / one layer: add_tvm_dispatch {many['add'] / one['add']:.2f}, ", end="")
    print(f"first step {many['first step'] / one['first step']:.2f}")
    if inductor:
        theirs = medians["torch.compile"]["first step"]
        print(f"ours / torch.compile, one layer: first step {one['first step'] / theirs:.3f}, ", end="")
        print(f"with import bridge {(one['import'] + one['first step']) / theirs:.3f}")
    print()


def _report_stacks(runs: int) -> None:
    measured: dict[int, list[Seconds]] = {layers: [] for layers in STACKS}
    for _ in range(runs):
        for layers in STACKS:
            measured[layers].append(_cold("stack", layers))
    medians = {layers: _medians(values) for layers, values in measured.items()}
    parts = [part for part in medians[STACKS[0]] if part != "add"]
    rows = [[str(n), m["add"], m["add"] / n, *(m[part] / n for part in parts)] for n, m in medians.items()]
    _table(["layers in one module", "seconds", "per layer", *(f"{part} / layer" for part in parts)], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3, help="cold processes per number (default %(default)s)")
    parser.add_argument("--only", choices=("layers", "stacks"), help="one of the two tables")
    parser.add_argument("--no-inductor", action="store_true", help="leave torch.compile out")
    parser.add_argument("--case", choices=sorted(CASES), help="measure in this process and print JSON")
    parser.add_argument("--layers", type=int, default=1, help="for --case")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.case:
        print(json.dumps(CASES[options.case](options.layers)))
        return
    import torch
    import tvm

    versions = f"torch {torch.__version__}, TVM {tvm.__version__}, {torch.get_num_threads()} threads"
    print(f"forward + backward, float32, medians of {options.runs}; {versions}, {platform.machine()}\n")
    if options.only != "stacks":
        _report_layers(options.runs, not options.no_inductor)
    if options.only != "layers":
        _report_stacks(options.runs)


if __name__ == "__main__":
    main()
