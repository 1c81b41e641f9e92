"""Products of half types whose rows begin anywhere: of large ones, operands and result lie in padded memory meanwhile.

cuBLAS has kernels of full speed for rows that begin at multiples of 16 bytes, and slow ones for others: a vocabulary of
30522 words, or 50257, makes the products of a language model's head two to seven times as long.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["padded_product", "product"]

_UNIT = 8
"""Numbers of a half type in 16 bytes."""

_LARGE = 2**33
"""Products of numbers from which on the copies take less time than they save."""

_NARROW = 512
"""An extent of fewer: the copies are no small part of the product."""

_WIDER = torch.complex128, torch.complex64, torch.int32
"""As which types rows are moved, the widest one that divides them."""


def product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """``a @ b`` into ``out``, which is dense and may be of a wider type."""
    if a.is_cuda and _is_slow(a, b):
        padded_product(a, b, out)
    else:
        _multiply(a, b, out)


def _is_slow(a: Tensor, b: Tensor) -> bool:
    (m, k), n = a.shape, b.shape[1]
    if a.element_size() != 2 or min(m, n, k) < _NARROW or m * n * k < _LARGE:
        return False
    return bool(n % _UNIT or k % _UNIT or _step(a) % _UNIT or _step(b) % _UNIT)


def _step(x: Tensor) -> int:
    """Numbers from one row, or column, to the next."""
    return max(x.stride())


def padded_product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """The same from copies with zeros behind: what they add to a sum are zeros."""
    (m, k), n = a.shape, b.shape[1]
    inner, columns = _up(k), _up(n)
    a, b = _padded(a, m, inner), _padded(b, inner, columns)
    if columns == n:
        _multiply(a, b, out)
        return
    wide = out.new_empty(m, columns)
    _multiply(a, b, wide)
    _move(wide[:, :n], out)


def _multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


def _padded(x: Tensor, rows: int, columns: int) -> Tensor:
    """``x`` with zeros behind, its rows (or columns, if those lie together) at multiples of 16 bytes."""
    if x.stride(1) != 1:
        return _padded(x.t(), columns, rows).t() if x.stride(0) == 1 else _padded(x.contiguous(), rows, columns)
    if (rows, columns) == tuple(x.shape) and x.stride(0) % _UNIT == 0:
        return x
    made = x.new_empty(rows, _up(columns))
    _move(x, made[: x.shape[0], : x.shape[1]])
    made[x.shape[0] :].zero_()
    made[:, x.shape[1] :].zero_()
    return made[:, :columns]


def _move(source: Tensor, target: Tensor) -> None:
    """Copies rows, by as many numbers at once as divide them."""
    for kind in _WIDER:
        unit = kind.itemsize // source.element_size()
        if all(_is_of(unit, each) for each in (source, target)):
            source, target = source.view(kind), target.view(kind)
            break
    target.copy_(source)


def _is_of(unit: int, x: Tensor) -> bool:
    """Whether rows begin, and end, at multiples of so many numbers."""
    numbers = x.shape[1], x.stride(0), x.storage_offset(), x.data_ptr() // x.element_size()
    return unit > 0 and x.stride(1) == 1 and not any(number % unit for number in numbers)


def _up(count: int) -> int:
    return -(-count // _UNIT) * _UNIT
