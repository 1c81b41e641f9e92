"""Tile choices: a product's shape → the tile that computes it, where one was measured to be quicker than torch.

Each shape is measured once, and its choice stays: equal products are computed alike, in the bit, by every program of
the process, and of every later one that finds the seconds in the disk cache. Between processes that do not share one,
the choice may differ where two ways are about as fast, and with it the rounding of sums.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import astuple, replace
from functools import partial

from bridge.base.interrupts import held
from bridge.base.locks import free_in_children
from bridge.base.log import channel
from bridge.compile.cuda import measured_products
from bridge.compile.cuda.tile_kernels import TILED
from bridge.compile.cuda.tile_ways import tile_ways
from bridge.compile.runtime.kept_times import kept_times
from bridge.compile.schedule.products import LayoutClass, ProductShape, product_of_plain

__all__ = ["TileChoices", "clear_tile_choices"]

_LOG = channel("compile")

_WORTH = 0.95
"""What a tile must take at most, of the time of the quickest of torch's ways, to be chosen instead of it."""

_LIBRARY = "mm"
"""What stands for torch's ways: which of them it is, is no matter of measuring."""

_MOST_SHAPES = 512
"""Shapes that one process measures; products of further ones are torch's."""

_CHOSEN: dict[tuple[int, ProductShape], str] = {}
_LOCK = free_in_children(threading.Lock())


def clear_tile_choices() -> None:
    """Forget every choice made in this process."""
    with _LOCK:
        _CHOSEN.clear()


class TileChoices:
    """Choices for one program, of those of the process.

    Args:
        index: of the device.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._asked: dict[ProductShape, str] = {}

    def tile(self, product: ProductShape, usual: Sequence[str]) -> str | None:
        """The way of a tile; ``None`` where torch's are as quick.

        Args:
            product: one that :func:`~bridge.compile.cuda.tile_ways.tile_ways` has ways for.
            usual: torch's ways, see :func:`~bridge.compile.cuda.measured_products.measured`.
        """
        product = replace(product, a=LayoutClass(product.a.unit), b=LayoutClass(product.b.unit))
        key = self._index, product
        with held(_LOCK):
            if key not in _CHOSEN:
                _CHOSEN[key] = self._fastest(product, usual)
            way = self._asked[product] = _CHOSEN[key]
        return None if way == _LIBRARY else way

    def _fastest(self, product: ProductShape, usual: Sequence[str]) -> str:
        if len(_CHOSEN) >= _MOST_SHAPES:
            return _LIBRARY
        machine = measured_products.machine(self._index)
        candidates = tile_ways(product, machine.multiprocessors, machine.most_parts)
        if not candidates:
            return _LIBRARY
        ways = [*usual, *candidates]
        measure = partial(measured_products.measured, self._index, product, ways)
        times = kept_times(machine.plain, product, ways, measure)
        tiles = {way: seconds for way, seconds in times.items() if way.startswith(TILED)}
        best = min(tiles, key=tiles.__getitem__, default=None)
        limit = min((seconds for way, seconds in times.items() if way not in tiles), default=0.0)
        told = ", ".join(f"{way} {1e6 * seconds:.1f}" for way, seconds in times.items())
        is_quicker = best is not None and times[best] <= _WORTH * limit
        _LOG.info("product %s: %s (microseconds: %s)", product, best if is_quicker else _LIBRARY, told)
        return best if is_quicker else _LIBRARY

    def made(self) -> tuple[tuple, ...]:
        """See :meth:`bridge.compile.schedule.products.ProductPolicy.made`, likewise the others."""
        return tuple((*astuple(product), way) for product, way in self._asked.items())

    def adopt(self, choices: Sequence[Sequence]) -> bool:
        with held(_LOCK):
            wanted = {product_of_plain(plain): way for *plain, way in choices}
            if any(_CHOSEN.get((self._index, product), way) != way for product, way in wanted.items()):
                return False
            self._asked.update(wanted)
            _CHOSEN.update({(self._index, product): way for product, way in wanted.items()})
            return True
