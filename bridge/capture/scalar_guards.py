"""Readings: numbers that forward takes out of tensors (``bool``, ``.item()``, ``torch.equal``) → what a call compares.

Python code that reads a number goes on as that number tells it to. So a record holds for calls that read the same
numbers. They are noted in the run on real numbers, given to the code in the run on fake ones, and become results of the
graph, which a compiled call compares with what was noted (:mod:`bridge.aten.number_checks`).
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
from bridge.capture.prepared_twin import PreparedTwin

__all__ = ["COUNTS", "FORMS", "ReadsDifferError", "ScalarGuard", "SharedArrays", "frozen", "line_of_reading"]
__all__ += ["names_of_reader", "numbers_of", "same_numbers", "tensor_of"]


class ReadsDifferError(Exception):
    """Forward reads other numbers on fake tensors than on real ones; with the user's line."""


@dataclass(frozen=True)
class ScalarGuard:
    """A number, or a list of them, that forward read.

    Attributes:
        where: ``file:line: code``, the user's line if there is one.
        dtype: of the numbers as they are compared: a flag is ``torch.bool`` whatever it was read from.
        count: how many.
        value: the numbers that Python got, lists as tuples.
        is_size: whether a result is as long as the number says (:mod:`bridge.capture.scalar_guards`).
        is_least: whether that is mostly the least length that was asked for, which other calls have as well.
    """

    where: str
    dtype: torch.dtype
    count: int
    value: Any
    is_size: bool = False
    is_least: bool = False

    @property
    def key(self) -> tuple:
        """Equal only for the same numbers read at the same line; zeros have a sign, and nan is nan."""
        return self.where, self.dtype, self.count, repr(self.value)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone()  # what is read, even if it is written later


def _flag(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone() if tensor.dtype is torch.bool else tensor != 0


def _integer(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.int64) if tensor.is_floating_point() else tensor.clone()


def _equal(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor | None:
    return (one == other).all() if one.shape == other.shape else None


def _allclose(one: torch.Tensor, other: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
    return torch.isclose(one, other, *rest, **options).all()


numbers_of: dict[str, Callable[..., torch.Tensor | None]] = {
    "item": _plain,
    "__int__": _integer,
    "__bool__": _flag,
    "equal": _equal,
    "allclose": _allclose,
}
"""What a function or an operator reads, by its name: its arguments → the numbers that decide about its answer; ``None``
where shapes alone do."""


def same_numbers(some: Sequence[ScalarGuard], others: Sequence[ScalarGuard]) -> bool:
    """Whether two runs read the same, bit by bit."""
    return [reading.key for reading in some] == [reading.key for reading in others]


def frozen(value: Any) -> Any:
    """Numbers with tuples in the place of lists."""
    return tuple(map(frozen, value)) if isinstance(value, list) else value


_OWN = (os.path.join(os.path.dirname(os.path.dirname(__file__)), ""),)
_OWN += tuple(os.path.join(TORCH_DIR, name) for name in ("overrides.py", "_ops.py", "_library"))
"""Where code between a line that reads and the recorder is from."""


def line_of_reading() -> str:
    """The user's line inside forward, or torch's own where forward is torch's."""
    innermost = _reader(sys._getframe(2))
    if innermost is None:
        return "forward"
    line = line_of((innermost.f_code.co_filename, innermost.f_lineno))
    return line[len(TORCH_DIR) - len("torch/") :] if line.startswith(TORCH_DIR) else line


def names_of_reader() -> dict[str, Any]:
    """The global names of the code that reads."""
    innermost = _reader(sys._getframe(2))
    return {} if innermost is None else innermost.f_globals


def _reader(frame: FrameType | None) -> FrameType | None:
    """The innermost frame that is the user's; else the one of torch's that is nearest to it."""
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


# Counted sizes: ``x[mask]``, ``nonzero``, ``repeat_interleave``, ``bincount`` → forms of a size that was counted.
#
# How many elements of a mask are set is a number that forward reads; with it, what it makes has a shape:
# ``nonzero_static(mask, size=count)``, and a gather at these positions, which is what eager computes as well. A call
# compares its counts with those that were compiled for, as any number that is read.


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


# Whole reads: all numbers of a tensor at once, as text, as a numpy array, as elements of another tensor.
#
# Text and arrays are those that eager makes; the numbers in them are read like any others. A tensor that is made of
# others (``torch.tensor([n, 2 * n])``), whose numbers torch reads in C++, is computed of them.


class SharedArrays:
    """Arrays that Python was given, which share memory with tensors."""

    def __init__(self) -> None:
        self._arrays: list[tuple[np.ndarray, np.ndarray, str]] = []

    def add(self, array: np.ndarray, where: str) -> np.ndarray:
        """Notes what an array holds, and the line that asks for it; returns a copy of that."""
        self._arrays.append((array, array.copy(), where))
        return self._arrays[-1][1]

    def written(self) -> list[Unsupported]:
        """Those that hold other numbers by now."""
        reason = "an array that shares memory with a tensor is written, or the tensor is"
        hint = "compute it with torch, or on a copy: x.clone().numpy()"
        changed = [where for array, before, where in self._arrays if array.tobytes() != before.tobytes()]
        return [Unsupported("Tensor.numpy", where, reason, hint) for where in changed]


def tensor_of(data: Any, dtype: torch.dtype | None, device: Any) -> torch.Tensor | None:
    """``torch.tensor(data)`` of nested lists of numbers and tensors of one element, computed of these; ``None`` where
    there is none of them, or where torch has other rules."""
    shape, flat = _flat(data)
    tensors = [each for each in flat if isinstance(each, torch.Tensor)]
    if shape is None or not tensors or isinstance(data, torch.Tensor):
        return None
    kinds = [each.dtype if isinstance(each, torch.Tensor) else _TYPES.get(type(each)) for each in flat]
    if None in kinds or any(each.numel() != 1 for each in tensors):
        return None
    kinds = [torch.get_default_dtype() if kind is float else kind for kind in kinds]
    dtype = reduce(torch.promote_types, kinds) if dtype is None else dtype
    if any(torch.promote_types(each.dtype, dtype) != dtype for each in tensors):
        return None
    with torch.no_grad():
        parts = [
            each.detach().reshape(()).to(device, dtype)
            if isinstance(each, torch.Tensor)
            else torch.full((), each, dtype=dtype, device=device)
            for each in flat
        ]
        return torch.stack(parts).reshape(shape)


_TYPES: dict[type, Any] = {bool: torch.bool, int: torch.int64, float: float}
"""Of Python's numbers; that of a float is the default one."""


def _flat(data: Any) -> tuple[tuple[int, ...] | None, list[Any]]:
    """The shape of nested lists, ``None`` if they are ragged, and what they hold."""
    if not isinstance(data, list | tuple):
        return (), [data]
    parts = [_flat(each) for each in data]
    shapes = {shape for shape, _ in parts}
    if len(shapes) != 1 or None in shapes:
        return None, []
    return (len(data), *shapes.pop()), [each for _, flat in parts for each in flat]
