"""Dropout masks: torch's own draws beside the compiled ones, bit for bit the same, in one process by turns.

Medians. A mask is one byte per element, as a dispatched module draws it; eager draws it in the module's dtype (third
column). The last rows are the three masks of a BertLayer, drawn together. A second table: the same masks on 1, 2, 4, …
threads, and on all threads beside foreign threads that sleep or compute.

    python -m benchmarks.draws
"""

from __future__ import annotations

import argparse
import platform
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import tvm

from bridge.capture.observation import Draw
from bridge.rng import cpu as mt19937
from bridge.rng.draws import Draws

SIZES = (1, 100, 300, 1000, 3000, 10_000, 100_000, 1_000_000, 3_000_000, 10_000_000)
KEEP = 0.9
PER_ROUND = 2e-3
"""The shortest turn of a peer, in seconds."""


def bert_masks(batch: int, tokens: int) -> list[tuple[int, ...]]:
    """Shapes of the dropouts of a BertLayer of 768 with 12 heads: attention probabilities, and two hidden states."""
    return [(batch, 12, tokens, tokens), (batch, tokens, 768), (batch, tokens, 768)]


def draws_of(shapes: list[tuple[int, ...]]) -> list[Draw]:
    strides = [torch.empty(shape, device="meta").stride() for shape in shapes]
    pairs = zip(shapes, strides, strict=True)
    return [Draw("aten.bernoulli_.float", shape, stride, torch.float32, (KEEP,)) for shape, stride in pairs]


def peers_of(shapes: list[tuple[int, ...]], kernels: mt19937.Kernels) -> dict[str, Callable[[], object]]:
    """Ways to draw these masks: eager's, torch into bytes, the compiled code, a dispatched module's choice."""
    draws = draws_of(shapes)
    masks = [mt19937.Mask(draw.shape, draw.stride, KEEP, draw.dtype) for draw in draws]
    everything = range(len(draws))
    chosen = Draws(draws, masks=everything, used=everything, module_name="benchmark")
    return {
        "eager": lambda: [torch.empty(shape).bernoulli_(KEEP) for shape in shapes],
        "torch": lambda: [mt19937.draw_by_torch(mask) for mask in masks],
        "compiled": mt19937.MaskRun(kernels, masks).draw,
        "module": chosen.make,
    }


def medians(peers: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Microseconds of each peer, by turns."""
    repeats = {}
    for peer, draw in peers.items():
        draw()
        started = time.perf_counter()
        draw()
        repeats[peer] = max(1, int(PER_ROUND / (time.perf_counter() - started)))
    times: dict[str, list[float]] = {peer: [] for peer in peers}
    for _ in range(rounds):
        for peer, draw in peers.items():
            started = time.perf_counter()
            for _ in range(repeats[peer]):
                draw()
            times[peer].append((time.perf_counter() - started) / repeats[peer])
    return {peer: 1e6 * statistics.median(values) for peer, values in times.items()}


def measure(name: str, shapes: list[tuple[int, ...]], kernels: mt19937.Kernels, rounds: int) -> str:
    """One row of the table."""
    median = medians(peers_of(shapes, kernels), rounds)
    elements = sum(torch.Size(shape).numel() for shape in shapes)
    ratio = median["compiled"] / median["torch"]
    cells = [
        name,
        *(f"{value:.1f}" for value in median.values()),
        f"{ratio:.3f}",
        f"{1e3 * median['compiled'] / elements:.2f}",
    ]
    return "| " + " | ".join(cells) + " |"


@contextmanager
def foreign_threads(count: int = 12) -> Iterator[None]:
    """While active, there are ``count`` more Python threads: one computes, the others sleep or wait."""
    stop = threading.Event()

    def compute() -> None:
        while not stop.is_set():
            sum(range(100))
            time.sleep(1e-3)

    works = [compute, stop.wait, lambda: time.sleep(0.1)]
    threads = [threading.Thread(target=works[min(number, 2)], daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()


def measure_threads(name: str, shapes: list[tuple[int, ...]], kernels: mt19937.Kernels, rounds: int) -> list[str]:
    """Rows of the second table: threads, microseconds, ratio to one thread."""
    most, rows, single = torch.get_num_threads(), [], 0.0
    counts = [count for count in (1, 2, 4, 8, 16, 32, 64) if count < most] + [most]
    for count in counts:
        torch.set_num_threads(count)
        taken = medians({"run": peers_of(shapes, kernels)["compiled"]}, rounds)["run"]
        single = single or taken
        rows.append(f"| {name} | {count} | {taken:.1f} | {taken / single:.3f} |")
    with foreign_threads():
        taken = medians({"run": peers_of(shapes, kernels)["compiled"]}, rounds)["run"]
    rows.append(f"| {name} | {most}, beside 12 others | {taken:.1f} | {taken / single:.3f} |")
    return rows


BERT = ((1, 14), (1, 128), (8, 128), (32, 128))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    started = time.perf_counter()
    kernels = mt19937.compiled()
    seconds = time.perf_counter() - started
    if kernels is None:
        print(f"torch {torch.__version__} draws by another rule on this machine: nothing to compare")
        return
    print(f"medians of {options.rounds}; torch {torch.__version__}, TVM {tvm.__version__}, {platform.machine()}")
    print(f"compiled and checked against torch in {seconds:.3f} s, once per process\n")
    peers = ["eager us", "torch, bytes us", "compiled us", "as a module draws us"]
    print("| masks | " + " | ".join([*peers, "compiled / torch", "ns per element"]) + " |\n|---" + "|---:" * 6 + "|")
    for size in SIZES:
        print(measure(f"{size:,}", [(size,)], kernels, options.rounds), flush=True)
    for batch, tokens in BERT:
        name = f"BertLayer ({batch}, {tokens})"
        print(measure(name, bert_masks(batch, tokens), kernels, options.rounds), flush=True)
    print("\n| masks | threads | us | of one thread |\n|---" + "|---:" * 3 + "|")
    for batch, tokens in BERT[1:]:
        for row in measure_threads(
            f"BertLayer ({batch}, {tokens})", bert_masks(batch, tokens), kernels, options.rounds
        ):
            print(row, flush=True)


if __name__ == "__main__":
    main()
