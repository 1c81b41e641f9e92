"""Counted sizes: ``x[mask]``, ``nonzero``, ``repeat_interleave``, ``bincount`` → forms of a size that was counted.

How many elements of a mask are set is a number that forward reads; with it, what it makes has a shape:
``nonzero_static(mask, size=count)``, and a gather at these positions, which is what eager computes as well. A call
compares its counts with those that were compiled for, as any number that is read (:mod:`bridge.capture.readings`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bridge.base.devices import HOST

__all__ = ["COUNTS", "FORMS"]

Count = Callable[[str, torch.Tensor], int]


def _set(x: torch.Tensor) -> torch.Tensor:
    return (x if x.dtype is torch.bool else x != 0).sum()


def _longest(lengths: torch.Tensor) -> torch.Tensor:
    falls = (lengths[1:] <= lengths[:-1]).all() & (lengths[-1] > 0)
    return torch.where(falls, lengths[0], -1)


#: What is counted, by name: elements that are not zero; elements in all; the first of lengths that do not rise; bins,
#: of which there is a least number.
COUNTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"set": _set, "total": torch.Tensor.sum}
COUNTS |= {"longest": _longest, "bins": torch.Tensor.sum}


def _positions(count: Count, x: torch.Tensor) -> torch.Tensor:
    """(count, axes): where elements are not zero, laid out as eager lays it out."""
    found = torch.nonzero_static(x, size=count("set", x))
    return found if x.device == HOST else found.t().contiguous().t()


def _nonzero(count: Count, input: torch.Tensor, *, as_tuple: bool = False, **others: Any) -> Any:
    if others or not input.dim():
        return NotImplemented
    found = _positions(count, input)
    return found.unbind(1) if as_tuple else found


def _where(count: Count, *args: Any, **others: Any) -> Any:
    return _nonzero(count, *args, as_tuple=True) if len(args) == 1 and not others else NotImplemented


def _masked_select(count: Count, input: torch.Tensor, mask: torch.Tensor, **others: Any) -> Any:
    if others:
        return NotImplemented
    x, mask = torch.broadcast_tensors(input, mask)
    return x[_positions(count, mask).unbind(1)] if mask.dim() else NotImplemented


def _is_mask(item: Any) -> bool:
    return isinstance(item, torch.Tensor) and item.dtype is torch.bool and item.dim() > 0


def _gathered(count: Count, x: torch.Tensor, index: Any) -> Any:
    items = index if isinstance(index, tuple) else (index,)
    if not any(map(_is_mask, items)) or not _fits(x, items):
        return NotImplemented
    return x[_spelled(count, items)]


def _scattered(count: Count, x: torch.Tensor, index: Any, value: Any) -> Any:
    """Where a value is as long as its mask has elements; one for all elements needs no positions."""
    if not _is_mask(index) or not isinstance(value, torch.Tensor) or not _fits(x, (index,)):
        return NotImplemented
    behind = x.dim() - index.dim()
    if value.dim() <= behind or value.shape[value.dim() - behind - 1] == 1:
        return NotImplemented
    x[_spelled(count, (index,))] = value
    return None


def _fits(x: torch.Tensor, items: tuple) -> bool:
    """Whether masks have the extents of the axes that they are for; where other items come first, eager may say so."""
    first, *_ = items
    return not _is_mask(first) or x.shape[: first.dim()] == first.shape


def _spelled(count: Count, items: tuple) -> tuple:
    """An index with positions along each axis in the place of masks, as eager spells it."""
    spelled: list[Any] = []
    for item in items:
        spelled += _positions(count, item).unbind(1) if _is_mask(item) else [item]
    return tuple(spelled)


def _repeated(count: Count, input: torch.Tensor, repeats: Any = None, dim: Any = None, **others: Any) -> Any:
    times = input if repeats is None else repeats
    if others or not isinstance(times, torch.Tensor) or times.dim() != 1:
        return NotImplemented
    if repeats is None:
        return torch.repeat_interleave(input, output_size=count("total", times))
    if dim is None or times.numel() != input.shape[dim]:
        return NotImplemented
    return torch.repeat_interleave(input, repeats, dim, output_size=count("total", times))


def _bincount(count: Count, input: torch.Tensor, weights: Any = None, minlength: int = 0, **others: Any) -> Any:
    """How often each number occurs: ones that are added up where it says.

    Where parameters decide the numbers, they are added up before their count is compared: none may lie outside, which
    ends a GPU's context. A negative number makes the count another one, and the call eager's, which refuses it.
    """
    if others or weights is not None or input.dim() != 1 or not input.numel() or input.is_floating_point():
        return NotImplemented
    places = input.long()
    bins = torch.where(places.min() < 0, -1, (places.max() + 1).clamp(min=minlength))
    size = count("bins" if minlength else "total", bins)
    if size < 0:
        return NotImplemented
    return places.new_zeros(size).index_add(0, places.clamp(0, size - 1), torch.ones_like(places))


FORMS: dict[Any, Callable[..., Any]] = {
    torch.nonzero: _nonzero,
    torch.Tensor.nonzero: _nonzero,
    torch.argwhere: _nonzero,
    torch.Tensor.argwhere: _nonzero,
    torch.where: _where,
    torch.masked_select: _masked_select,
    torch.Tensor.masked_select: _masked_select,
    torch.Tensor.__getitem__: _gathered,
    torch.Tensor.__setitem__: _scattered,
    torch.bincount: _bincount,
    torch.Tensor.bincount: _bincount,
    torch.repeat_interleave: _repeated,
    torch.Tensor.repeat_interleave: _repeated,
}
"""Functions whose results are as long as numbers say → how they are spelled with these numbers: which number (of
:data:`COUNTS`) of which tensor → that number, and the arguments → the result, or ``NotImplemented``."""
