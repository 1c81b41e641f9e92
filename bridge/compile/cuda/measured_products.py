"""Measured products on a GPU: a product's shape → seconds of torch's kernels and of a few tiles of our own.

Few rows make few tiles, which leave most of a GPU idle. Other tiles, or parts of the inner axis side by side, may take
half the time of the library's choice. A shape is measured once per machine, on matrices of memory that is ours; what is
drawn by anybody, and what is captured, is left alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch

from bridge.base.log import channel
from bridge.base.plain_thread import in_a_plain_thread
from bridge.base.threads import serves
from bridge.base.torch_cuda import sleep
from bridge.compile.cuda.driver import DriverError, at_any_moment
from bridge.compile.cuda.driver_graphs import new_stream
from bridge.compile.cuda.nvrtc import version
from bridge.compile.cuda.tile_kernels import TILED, load, multiply
from bridge.compile.cuda.tile_source import MOST_RANKS
from bridge.compile.schedule.products import ProductShape
from bridge.library import OUT_KERNELS

__all__ = ["PARTS", "Machine", "machine", "measured"]

_LOG = channel("compile")

_ROUNDING = 1e-4
"""Of the largest number, that two orders of the same sums may differ by; what is wrong differs by more."""

_LAUNCHES, _ROUNDS = 12, 3
"""That are timed at once, and how often each way has its turn; the shortest time counts."""

_AHEAD = 300_000
"""Cycles that the GPU is kept busy while the host launches."""

_MOST_COPIES = 12
"""Of the second matrix, which take turns: a weight is seldom in the GPU's cache."""

PARTS = "bmm"
"""First word of the way that multiplies parts, so many, which readers add up."""


@dataclass(frozen=True)
class Machine:
    """A GPU, as far as tiles and their times depend on it.

    Attributes:
        most_parts: blocks that can read one another's shared memory; 0 where there are no tile kernels.
        plain: what seconds depend on.
    """

    multiprocessors: int
    most_parts: int
    plain: tuple


@functools.cache
def machine(index: int) -> Machine:
    """Of a device."""
    told = torch.cuda.get_device_properties(index)
    plain = "cuda", told.name, told.multi_processor_count, torch.version.cuda, version()
    return Machine(told.multi_processor_count, MOST_RANKS if told.major >= 9 else int(told.major == 8), plain)


@functools.cache
def _stream(index: int) -> torch.cuda.Stream:
    """Of this module: torch's own are handed out in turns, and one of them may be captured by another thread."""
    return torch.cuda.ExternalStream(new_stream(), torch.device("cuda", index))


def measured(index: int, product: ProductShape, ways: Sequence[str]) -> dict[str, float]:
    """Seconds of each way on a device: names of library kernels, ``"bmm"`` and a number of parts, tiles.

    None where there is no memory for it, or the caller captures a stream.
    """
    if torch.cuda.is_current_stream_capturing():
        return {}
    return in_a_plain_thread(partial(_measured, index, product, ways))


def _measured(index: int, product: ProductShape, ways: Sequence[str]) -> dict[str, float]:
    with torch.cuda.device(index), torch.cuda.stream(_stream(index)), at_any_moment():
        try:
            a, weights, out = _memory(product, torch.device("cuda", index))
            return _seconds({way: _run(way, a, weights, out) for way in _built(index, product, ways)}, out)
        except torch.cuda.OutOfMemoryError as error:
            _LOG.info("product %s is not measured: %s", product, error)
            return {}


def _built(index: int, product: ProductShape, ways: Sequence[str]) -> list[str]:
    """The ways without those whose kernel cannot be made, all made at the same time."""

    def build(way: str) -> str | None:
        name, *numbers = way.split()
        if name != TILED:
            return way
        try:
            load(index, tuple(map(int, numbers)), product.a.unit == "row", product.b.unit == "column")
        except (RuntimeError, OSError) as error:
            _LOG.info("%s cannot be measured: %s", way, error)
            return None
        return way

    with ThreadPoolExecutor(max(1, len(ways)), "bridge-nvrtc", serves) as threads:
        return [way for way in threads.map(build, ways) if way is not None]


def _memory(product: ProductShape, device: torch.device) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """The first matrix, several that take turns as the second and do not fit into the GPU's cache, and the result."""
    m, n, k = product.m, product.n, product.k
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    count = min(_MOST_COPIES, math.ceil(2 * cache / (4 * n * k)) + 1)

    def matrices(number: int, rows: int, columns: int, unit: str) -> torch.Tensor:
        extents = (columns, rows) if unit == "column" else (rows, columns)
        made = torch.arange(number * rows * columns, dtype=torch.int32, device=device)
        made = (made.mul_(40503).remainder_(1021).float() / 1021 - 0.5).view(number, *extents)
        return made.mT if unit == "column" else made

    seconds = list(matrices(count, k, n, product.b.unit))
    return matrices(1, m, k, product.a.unit)[0], seconds, torch.empty(m, n, device=device)


Run = Callable[[int], object]
"""Launches a way once, by a second matrix of this number."""


def _run(way: str, a: torch.Tensor, weights: Sequence[torch.Tensor], out: torch.Tensor) -> Run:
    name, *words = way.split()
    numbers = tuple(map(int, words))
    if name == TILED:
        return lambda turn: multiply(a, weights[turn % len(weights)], out, numbers)
    if name == PARTS:
        (count,) = numbers
        parts = out.new_empty(count, *out.shape)
        first, second = (
            a.unflatten(1, (count, -1)).transpose(0, 1),
            [each.unflatten(0, (count, -1)) for each in weights],
        )
        return lambda turn: torch.bmm(first, second[turn % len(second)], out=parts)
    kernel = OUT_KERNELS[name]
    return lambda turn: kernel([out], [a, weights[turn % len(weights)]])


def _seconds(runs: Mapping[str, Run], out: torch.Tensor) -> dict[str, float]:
    """The shortest time of each; they take turns. What raises, or gives other numbers than the first, is left out."""
    first, *others = runs
    runs[first](0)
    wanted, best = out.clone(), {first: math.inf}
    for way in others:
        out.fill_(math.nan)
        try:
            runs[way](0)
        except DriverError as error:
            _LOG.info("%s cannot be measured: %s", way, error)
            continue
        if not way.startswith(TILED) or _is_same(out, wanted):
            best[way] = math.inf
        else:
            _LOG.warning("%s gives wrong numbers on this GPU and is not used", way)
    for _ in range(_ROUNDS):
        for way in best:
            best[way] = min(best[way], _seconds_of(runs[way]))
    return best


def _seconds_of(run: Run) -> float:
    """Of one launch, the host ahead of the GPU."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    sleep(_AHEAD)
    begin.record()
    for turn in range(_LAUNCHES):
        run(turn)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / _LAUNCHES


def _is_same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool((found - wanted).abs().max() <= _ROUNDING * wanted.abs().max())
