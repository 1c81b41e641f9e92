"""Tile candidates: a product's shape → the few tiles, with parts of the inner axis, that are worth a measurement.

Which tiles those are was seen on an H200, of 29 for matrices of 8 to 10,496 rows by 512 to 3072 columns: of 14 rows the
best takes 0.32 to 0.66 of torch's time, of 64 rows 0.65 to 0.85, of 128 and 328 rows 0.65 to 1.2; of more rows, none is
quicker. Parts of the inner axis fill the multiprocessors evenly.
"""

from __future__ import annotations

from autodiff.extents import Extent
from bridge.compile.cuda.tile_kernels import way_of
from bridge.compile.cuda.tile_source import Tile
from bridge.compile.schedule.products import ProductShape

__all__ = ["is_tiled", "tile_ways"]

_LEAST, _MOST = 2**20, 2**30
"""Multiplications of a product that is worth a measurement."""

_FEW = 384
"""The shortest extent of such a product, at most: of longer ones, torch's tiles fill a GPU."""

_LOW, _WIDE = Tile(16, 32, 64, 8, 4, 16, 4, 2), Tile(16, 64, 64, 16, 4, 16, 3, 1)
_SMALL, _EVEN = Tile(32, 32, 64, 8, 4, 8, 3, 2), Tile(32, 64, 32, 8, 8, 4, 4, 4)
_MIDDLE = Tile(48, 64, 32, 8, 8, 4, 3, 2)
_SQUARE, _LONE = Tile(64, 64, 16, 8, 8, 2, 4, 3), Tile(64, 64, 32, 8, 8, 4, 3, 1)
_LARGE = Tile(64, 128, 16, 8, 8, 1, 4, 3)

_TILES = {
    16: (_LOW, _WIDE),
    32: (_LOW, _SMALL, _WIDE),
    64: (_SMALL, _WIDE, _LONE, _SQUARE),
    160: (_SMALL, _SQUARE, _LONE, _LARGE),
    _FEW: (_SMALL, _MIDDLE, _EVEN, _LARGE),
}
"""Tiles of products of so many rows at most, the quickest in most cases first."""

_OF_MANY_ROWS = _LARGE, _SQUARE, _MIDDLE
"""Of products of many rows by few inner elements, as the gradient of a weight is."""

_TRIED = 3
"""Numbers of parts that each tile is tried with."""


def is_tiled(product: ProductShape) -> bool:
    """Whether tiles may compute a product in less time than torch: matrices of float32 with a short extent, which lie
    as kernels read them."""
    extents = product.m, product.n, product.k
    if product.element_type != "float32" or product.batch != 1 or any(isinstance(x, Extent) for x in extents):
        return False
    rows = {"row": product.k, "column": product.m}.get(product.a.unit, 1)
    columns = {"row": product.n, "column": product.k}.get(product.b.unit, 1)
    if rows % 4 or columns % 4:
        return False
    return 1 < min(extents) <= _FEW and _LEAST <= product.multiplications <= _MOST


def tile_ways(product: ProductShape, multiprocessors: int, most_parts: int) -> list[str]:
    """Ways of the candidates, see :func:`bridge.compile.cuda.tile_kernels.way_of`; of at most so many parts."""
    tiles = next((tiles for rows, tiles in _TILES.items() if product.m <= rows), _OF_MANY_ROWS)
    return [way_of(tile, parts) for tile in tiles for parts in _parts(tile, product, multiprocessors, most_parts)]


def _parts(tile: Tile, product: ProductShape, multiprocessors: int, most: int) -> list[int]:
    """Parts of the inner axis with which the busiest multiprocessor has the fewest steps; of equal ones, more parts."""
    tiles = -(-product.m // tile.rows) * -(-product.n // tile.columns)
    all_steps = -(-product.k // tile.inner)

    def steps(parts: int) -> int:
        return -(-tiles * parts // multiprocessors) * -(-all_steps // parts)

    at_once = max(1, multiprocessors * tile.blocks // tiles)
    possible = range(1, min(most, all_steps, at_once) + 1)
    return sorted(possible, key=lambda parts: (steps(parts), -parts))[:_TRIED]
