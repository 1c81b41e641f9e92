"""Dropout masks: torch's own drawing beside the compiled one, bit for bit the same, in one process by turns.

Medians. A mask is one byte per element, as a dispatched module draws it; eager draws it in the module's dtype, which is
the third column. The last rows are the three masks of a BertLayer, drawn together.

    python -m benchmarks.draws
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import torch
import tvm

from bridge.capture.observation import Draw
from bridge.rng import cpu as mt19937
from bridge.rng.draws import Draws

SIZES = (1, 100, 300, 1000, 3000, 10_000, 100_000, 1_000_000, 3_000_000, 10_000_000)
KEEP = 0.9
PER_ROUND = 2e-3
"""Seconds that one peer's turn takes, at least."""


def bert_masks(batch: int, tokens: int) -> list[tuple[int, ...]]:
    """Shapes of what a BertLayer of 768 with 12 heads drops: attention probabilities, and two hidden states."""
    return [(batch, 12, tokens, tokens), (batch, tokens, 768), (batch, tokens, 768)]


def draws_of(shapes: list[tuple[int, ...]]) -> list[Draw]:
    strides = [torch.empty(shape, device="meta").stride() for shape in shapes]
    pairs = zip(shapes, strides, strict=True)
    return [Draw("aten.bernoulli_.float", shape, stride, torch.float32, (KEEP,)) for shape, stride in pairs]


def peers_of(shapes: list[tuple[int, ...]], kernels: mt19937.Kernels) -> dict[str, Callable[[], object]]:
    """What draws these masks: eager's way, torch into bytes, the compiled code, what a dispatched module chooses."""
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


def measure(name: str, shapes: list[tuple[int, ...]], kernels: mt19937.Kernels, rounds: int) -> str:
    """One row of the table."""
    peers = peers_of(shapes, kernels)
    repeats = {}
    for peer, draw in peers.items():
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
    median = {peer: 1e6 * statistics.median(values) for peer, values in times.items()}
    elements = sum(torch.Size(shape).numel() for shape in shapes)
    ratio = median["compiled"] / median["torch"]
    cells = [
        name,
        *(f"{median[peer]:.1f}" for peer in peers),
        f"{ratio:.3f}",
        f"{1e3 * median['compiled'] / elements:.2f}",
    ]
    return "| " + " | ".join(cells) + " |"


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
    for batch, tokens in ((1, 14), (1, 128), (8, 128)):
        name = f"BertLayer ({batch}, {tokens})"
        print(measure(name, bert_masks(batch, tokens), kernels, options.rounds), flush=True)


if __name__ == "__main__":
    main()
