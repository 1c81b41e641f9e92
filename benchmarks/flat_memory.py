"""Resident memory over hundreds of steps: a dispatched module's memory must not grow.

    train       forward, backward, AdamW; every step dispatched
    partial     only some outputs get a grad_out, a graph is retained, a result is dropped without a backward
    misses      every second call is of another shape and runs eager
    failures    a hook raises in the middle of every backward
    entries     on_miss="compile" with more shapes than the module keeps entries: programs come and go

Each runs in a process of its own. RSS is read from /proc, after a garbage collection.

    python -m benchmarks.flat_memory                # BertLayer-sized; --small for the size of the tests
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from torch import Tensor, nn

from bridge import add_tvm_dispatch, stats

EARLY, LATE = 50, 300
"""Steps after which memory is read."""
ALLOWED = 0.01
"""Growth between the two, as a share of the first."""


class Block(nn.Module):
    """Two products, normalization, dropout and two results: each kind of memory that a program keeps."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.seen.add_(1)
        hidden = torch.nn.functional.gelu(self.up(self.norm(x)))
        return x + self.drop(self.down(hidden)), hidden.mean(-1)


Step = Callable[[int], object]


def _train(module: nn.Module, x: Tensor) -> Step:
    optimizer = torch.optim.AdamW(module.parameters())

    def step(index: int) -> None:
        y, mean = module(x)
        (y.square().mean() + mean.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _partial(module: nn.Module, x: Tensor) -> Step:
    def step(index: int) -> None:
        y, mean = module(x)
        if index % 3 == 0:
            mean.sum().backward(retain_graph=True)
            y.sum().backward()
        elif index % 3 == 1:
            y.sum().backward()

    return step


def _misses(module: nn.Module, x: Tensor) -> Step:
    train = _train(module, x)

    def step(index: int) -> None:
        if index % 2:
            module(x[: 1 + index % (len(x) - 1)])[0].sum().backward()
        else:
            train(index)

    return step


class Interrupted(Exception):
    """Raised by a hook in the middle of a backward."""


def _failures(module: nn.Module, x: Tensor) -> Step:
    before = nn.Linear(x.shape[-1], x.shape[-1])

    def interrupt(gradient: Tensor) -> None:
        raise Interrupted

    def step(index: int) -> None:
        given = before(x)
        given.register_hook(interrupt)
        try:
            module(given)[0].sum().backward()
        except Interrupted:
            module.zero_grad()

    return step


def _entries(module: nn.Module, x: Tensor) -> Step:
    lengths = len(x)

    def step(index: int) -> None:
        module(x[: 1 + index // 2 % (lengths - 1)])[0].sum().backward()

    return step


WORKLOADS: dict[str, Callable[[nn.Module, Tensor], Step]] = {
    "train": _train,
    "partial": _partial,
    "misses": _misses,
    "failures": _failures,
    "entries": _entries,
}


def resident() -> int:
    """Resident bytes of this process, after a garbage collection and the return of the C library's free pages."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(name: str, *, rows: int, width: int, early: int = EARLY, late: int = LATE) -> tuple[int, int, int]:
    """Runs a workload → resident bytes after ``early`` and ``late`` steps, number of dispatched calls."""
    torch.manual_seed(0)
    module = Block(width)
    sample = torch.randn(rows, width, requires_grad=name == "failures")
    add_tvm_dispatch(module, sample, on_miss="compile" if name == "entries" else "eager")
    step = WORKLOADS[name](module, torch.randn(rows, width))
    first = 0
    for index in range(late):
        step(index)
        if index + 1 == early:
            first = resident()
    return first, resident(), stats(module).hits


def _in_process(name: str, rows: int, width: int) -> tuple[int, int, int]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, name, rows=rows, width=width).result()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.flat_memory", description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="8 rows of 16 instead of 1024 of 256")
    parser.add_argument("workloads", nargs="*", default=list(WORKLOADS), help=", ".join(WORKLOADS))
    options = parser.parse_args(argv)
    rows, width = (8, 16) if options.small else (1024, 256)
    grew = False
    print(f"| workload | RSS after step {EARLY}, MiB | after step {LATE}, MiB | growth | dispatched |")
    print("|---|---:|---:|---:|---:|")
    for name in options.workloads:
        first, last, hits = _in_process(name, 12 if name == "entries" else rows, width)
        growth = last / first - 1
        grew |= growth > ALLOWED
        print(f"| {name} | {first / 2**20:.1f} | {last / 2**20:.1f} | {growth:+.2%} | {hits} of {LATE} |", flush=True)
    return int(grew)


if __name__ == "__main__":
    raise SystemExit(main())
