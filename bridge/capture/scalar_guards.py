"""Scalar guards: numbers that forward reads from tensors (``bool``, ``.item()``, ``torch.equal``) → guards of a call.

A number that Python code reads may decide its branches. So a record holds for calls that read the same numbers. The
real run notes them, and the fake run returns them to the code. They become results of the graph, which a compiled call
compares with the noted numbers (:mod:`bridge.aten.number_checks`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from types import FrameType
from typing import Any

import numpy as np
import torch

from bridge.base.devices import HOST
from bridge.base.errors import TORCH_DIR, Unsupported, is_user_file, line_of
from bridge.base.torch_internals import VF, TensorBase
from bridge.capture.prepared_twin import PreparedTwin


@dataclass(frozen=True)
class ScalarGuard:
    """A number, or a list of them, that forward read.

    Attributes:
        where: ``file:line: code``, the user's line if there is one.
        dtype: dtype of the compared numbers: ``torch.bool`` for a flag, whatever tensor it was read from.
        count: how many numbers.
        value: the numbers that Python got, lists as tuples.
        is_size: whether the number is the length of a result.
        is_least: whether that length has a lower bound (``minlength``), so that most calls have the same.
    """

    where: str
    dtype: torch.dtype
    count: int
    value: Any
    is_size: bool = False
    is_least: bool = False

    @property
    def key(self) -> tuple:
        """A key that is equal only for the same numbers read at the same line; 0.0 is not -0.0, and nan is nan."""
        return self.where, self.dtype, self.count, repr(self.value)


def _equal(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor | None:
    return (one == other).all() if one.shape == other.shape else None


numbers_of: dict[str, Callable[..., torch.Tensor | None]] = {
    "item": lambda tensor: tensor.clone(),  # it may be written later
    "__int__": lambda tensor: tensor.to(torch.int64) if tensor.is_floating_point() else tensor.clone(),
    "__bool__": lambda tensor: tensor.clone() if tensor.dtype is torch.bool else tensor != 0,
    "equal": _equal,
    "allclose": lambda *pair, **options: VF.isclose(*pair, **options).all(),
}
"""Name of a function or an operator → a function of its arguments, which returns the tensor of numbers that decide its
result; ``None`` if shapes alone decide it."""


def same_numbers(some: Sequence[ScalarGuard], others: Sequence[ScalarGuard]) -> bool:
    """Whether two runs read the same numbers, bit by bit."""
    return [reading.key for reading in some] == [reading.key for reading in others]


def frozen(value: Any) -> Any:
    """Nested numbers with tuples in the place of lists."""
    return tuple(map(frozen, value)) if isinstance(value, list) else value


_OWN = (os.path.join(os.path.dirname(os.path.dirname(__file__)), ""),)
_OWN += tuple(os.path.join(TORCH_DIR, name) for name in ("overrides.py", "_ops.py", "_library"))
"""Paths of the code between a line that reads and the recorder."""


def line_of_reading() -> str:
    """The user's line inside forward that reads, or torch's line if forward is torch's."""
    innermost = _reader(sys._getframe(2))
    if innermost is None:
        return "forward"
    line = line_of((innermost.f_code.co_filename, innermost.f_lineno))
    return line[len(TORCH_DIR) - len("torch/") :] if line.startswith(TORCH_DIR) else line


def names_of_reader() -> dict[str, Any]:
    """The globals of the code that reads."""
    innermost = _reader(sys._getframe(2))
    return {} if innermost is None else innermost.f_globals


def _reader(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the user's code, else of code outside of ``_OWN``."""
    innermost = None
    while frame is not None and frame.f_code is not PreparedTwin.__call__.__code__:
        file = frame.f_code.co_filename
        if is_user_file(file):
            innermost = frame
            break
        if innermost is None and not file.startswith(_OWN):
            innermost = frame
        frame = frame.f_back
    return innermost


# Counted sizes: ``x[mask]``, ``nonzero``, ``repeat_interleave``, ``bincount`` → static-shape forms with a counted size.
#
# The number of set elements of a mask is a number that forward reads. With it, the result has a static shape:
# ``nonzero_static(mask, size=count)``, and a gather at these positions, as eager computes it. A call compares its
# counts with the compiled ones, like any number that forward reads.


Count = Callable[[str, torch.Tensor], int]


def _set(x: torch.Tensor) -> torch.Tensor:
    return (x if x.dtype is torch.bool else x != 0).sum()


def _longest(lengths: torch.Tensor) -> torch.Tensor:
    falls = (lengths[1:] <= lengths[:-1]).all() & (lengths[-1] > 0)
    return VF.where(falls, lengths[0], -1)


#: Name -> count of a tensor: its nonzero elements; its sum; the first of positive lengths that never rise, else -1; a
#: number of bins with a lower bound.
COUNTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"set": _set, "total": TensorBase.sum}
COUNTS |= {"longest": _longest, "bins": TensorBase.sum}


def _positions(count: Count, x: torch.Tensor) -> torch.Tensor:
    """``(count, axes)`` int64 positions of nonzero elements, in eager's memory layout."""
    found = VF.nonzero_static(x, size=count("set", x))
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
    """``x[mask] = value`` for a value with one row per set element; a broadcast value needs no positions."""
    if not _is_mask(index) or not isinstance(value, torch.Tensor) or not _fits(x, (index,)):
        return NotImplemented
    behind = x.dim() - index.dim()
    if value.dim() <= behind or value.shape[value.dim() - behind - 1] == 1:
        return NotImplemented
    x[_spelled(count, (index,))] = value
    return None


def _fits(x: torch.Tensor, items: tuple) -> bool:
    """Whether a first mask has the extents of its axes; for masks behind other items, eager raises the error."""
    first, *_ = items
    return not _is_mask(first) or x.shape[: first.dim()] == first.shape


def _spelled(count: Count, items: tuple) -> tuple:
    """An index with positions along each axis in the place of masks, as in eager."""
    spelled: list[Any] = []
    for item in items:
        spelled += _positions(count, item).unbind(1) if _is_mask(item) else [item]
    return tuple(spelled)


def _repeated(count: Count, input: torch.Tensor, repeats: Any = None, dim: Any = None, **others: Any) -> Any:
    times = input if repeats is None else repeats
    if others or not isinstance(times, torch.Tensor) or times.dim() != 1:
        return NotImplemented
    if repeats is None:
        return VF.repeat_interleave(input, output_size=count("total", times))
    if dim is None or times.numel() != input.shape[dim]:
        return NotImplemented
    return VF.repeat_interleave(input, repeats, dim, output_size=count("total", times))


def _bincount(count: Count, input: torch.Tensor, weights: Any = None, minlength: int = 0, **others: Any) -> Any:
    """``bincount`` as an ``index_add`` of ones or weights: integers → (bins) int64, or float32 or float64 for weights.

    If parameters decide the numbers, the addition runs before their count is compared. So the numbers are clamped: one
    out of range would end a GPU's context. A negative number makes the count -1, and the call eager's, which raises.
    """
    if others or input.dim() != 1 or not input.numel() or input.is_floating_point():
        return NotImplemented
    places = input.long()
    if weights is None:
        weights = VF.ones_like(places)
    elif weights.shape != input.shape or weights.is_complex() or weights.requires_grad:
        return NotImplemented
    elif weights.dtype is not torch.float32:
        weights = weights.double()
    bins = VF.where(places.min() < 0, -1, (places.max() + 1).clamp(min=minlength))
    size = count("bins" if minlength else "total", bins)
    if size < 0:
        return NotImplemented
    return weights.new_zeros(size).index_add(0, places.clamp(0, size - 1), weights)


def _unique(count: Count, input: torch.Tensor, sorted: bool = True, *options: Any, **others: Any) -> Any:
    return _distinct(count, input, True, *options, **others) if sorted else NotImplemented


def _unique_consecutive(count: Count, input: torch.Tensor, *options: Any, **others: Any) -> Any:
    return _distinct(count, input, False, *options, **others)


def _distinct(
    count: Count,
    input: torch.Tensor,
    is_sorted: bool,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
) -> Any:
    """``unique`` of all elements: integers → (distinct), (of input) int64, (distinct) int64, as asked for."""
    if dim is not None or input.is_floating_point() or input.is_complex() or not input.numel():
        return NotImplemented
    elements = input.reshape(-1)
    elements, order = elements.sort() if is_sorted else (elements, None)
    first = VF.cat([VF.ones_like(elements[:1], dtype=torch.bool), elements[1:] != elements[:-1]])
    places = _positions(count, first)[:, 0]
    rank = first.cumsum(0) - 1
    found = [elements[places]]
    if return_inverse:
        inverse = rank if order is None else VF.zeros_like(order).scatter(0, order, rank)
        found.append(inverse.reshape(input.shape))
    if return_counts:
        found.append(VF.zeros_like(places).index_add(0, rank, VF.ones_like(rank)))
    return tuple(found) if len(found) > 1 else found[0]


FORMS: dict[Any, Callable[..., Any]] = {
    VF.nonzero: _nonzero,
    TensorBase.nonzero: _nonzero,
    VF.argwhere: _nonzero,
    TensorBase.argwhere: _nonzero,
    VF.where: _where,
    VF.masked_select: _masked_select,
    TensorBase.masked_select: _masked_select,
    TensorBase.__getitem__: _gathered,
    TensorBase.__setitem__: _scattered,
    VF.bincount: _bincount,
    TensorBase.bincount: _bincount,
    VF.repeat_interleave: _repeated,
    torch.unique: _unique,
    torch.Tensor.unique: _unique,
    torch.unique_consecutive: _unique_consecutive,
    torch.Tensor.unique_consecutive: _unique_consecutive,
    TensorBase.repeat_interleave: _repeated,
}
"""Function with a data-dependent size → its static-shape form. The form takes ``count`` (a name in :data:`COUNTS`, a
tensor → the number) and the function's arguments, and returns the result or ``NotImplemented``."""


# Whole reads: all numbers of a tensor at once, as text, as a numpy array, as elements of another tensor.
#
# Text and arrays are eager's; their numbers are read like any others. A tensor made from other tensors' numbers
# (``torch.tensor([n, 2 * n])``), which torch reads in C++, is computed from these tensors.


def written_arrays(arrays: Sequence[tuple[np.ndarray, np.ndarray, str]]) -> list[Unsupported]:
    """Refusals of arrays whose numbers have changed; ``arrays``: each with a copy of its numbers and its line."""
    reason = "an array that shares memory with a tensor is written, or the tensor is"
    hint = "compute it with torch, or on a copy: x.clone().numpy()"
    changed = [where for array, before, where in arrays if array.tobytes() != before.tobytes()]
    return [Unsupported("Tensor.numpy", where, reason, hint) for where in changed]


def tensor_of(data: Any, dtype: torch.dtype | None, device: Any) -> Any:
    """``torch.tensor(data)`` for nested lists of numbers and one-element tensors, computed from the tensors;
    ``NotImplemented`` if ``data`` has no tensor, or if torch has other rules for it."""
    shape, flat = _flat(data)
    tensors = [each for each in flat if isinstance(each, torch.Tensor)]
    if shape is None or not tensors or isinstance(data, torch.Tensor):
        return NotImplemented
    kinds = [each.dtype if isinstance(each, torch.Tensor) else _TYPES.get(type(each)) for each in flat]
    if None in kinds or any(each.numel() != 1 for each in tensors):
        return NotImplemented
    kinds = [torch.get_default_dtype() if kind is float else kind for kind in kinds]
    dtype = reduce(torch.promote_types, kinds) if dtype is None else dtype
    if any(torch.promote_types(each.dtype, dtype) != dtype for each in tensors):
        return NotImplemented
    with torch.no_grad():
        parts = [
            each.detach().reshape(()).to(device, dtype)
            if isinstance(each, torch.Tensor)
            else VF.full((), each, dtype=dtype, device=device)
            for each in flat
        ]
        return VF.stack(parts).reshape(shape)


_TYPES: dict[type, Any] = {bool: torch.bool, int: torch.int64, float: float}
"""Python type of a number -> its dtype; ``float`` stands for the default dtype."""


def _flat(data: Any) -> tuple[tuple[int, ...] | None, list[Any]]:
    """The shape of nested lists, ``None`` if they are ragged, and their leaves."""
    if not isinstance(data, list | tuple):
        return (), [data]
    parts = [_flat(each) for each in data]
    shapes = {shape for shape, _ in parts}
    if len(shapes) != 1 or None in shapes:
        return None, []
    return (len(data), *shapes.pop()), [each for _, flat in parts for each in flat]
