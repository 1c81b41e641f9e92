"""Number index: ``x[t]``, ``x[t] = v`` with a 0-d integer tensor ``t`` → a selection at a position that the call gives.

Eager reads the number and takes a view there. Traced like that, the entry would serve the sample's number alone. Here
the export sees ``select`` at an unbacked number, and a write as ``index_put_``; the fake run sees eager's own view, at
position 0, with ``tvm_dispatch::position`` before it, so that its trace differs from that of ``x[0]``. What depends on
where that view lies (which elements two results share) is refused (:meth:`NumberIndices.returned`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from bridge.base.errors import Unsupported
from bridge.base.torch_internals import TorchDispatchMode, aten, storage_id
from bridge.capture.observation import Output
from bridge.capture.overlap import overlaps_itself

__all__ = ["NumberIndices", "PositionsAreZero", "SymbolicNumberIndices", "computes_with_numbers"]

_library = torch.library.Library("tvm_dispatch", "FRAGMENT")
_library.define("position(Tensor index) -> int")
for _kind in ("CompositeExplicitAutograd", "Meta"):
    _library.impl("position", lambda index: 0, _kind)

_INDEX_TYPES = (torch.int64, torch.int32, torch.int16, torch.int8)
"""An index of one uint8 or bool is a mask."""


def _is_number(item: Any) -> bool:
    return isinstance(item, torch.Tensor) and item.dim() == 0 and item.dtype in _INDEX_TYPES


def _items(index: Any) -> tuple:
    return index if isinstance(index, tuple) else (index,)


class NumberIndices(TorchFunctionMode):
    """While forward runs on fake tensors: 0-d integer tensors in an index are position 0, and are told to the trace."""

    def __init__(self) -> None:
        super().__init__()
        self._bases: list[torch.Tensor] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) and any(map(_is_number, _items(args[1]))):
            x, index, *value = args
            self._bases.append(x)
            return func(x, tuple(map(_at_zero, _items(index))), *value)
        return func(*args, **(kwargs or {}))

    def returned(self, results: Sequence[tuple[torch.Tensor, Output]]) -> list[Unsupported]:
        """Why tensors that the call returns cannot be had: parts of memory of which the caller sees others too."""
        memory = {storage_id(base) for base in self._bases}
        own = Counter(storage_id(leaf) for leaf, output in results if not output.alias_of)
        for leaf, output in results:
            is_view = output.alias_of is not None and not output.is_same_object
            if storage_id(leaf) in memory and (is_view or own[storage_id(leaf)] > 1):
                reason = "returns a view, at a position that a tensor gives, of memory that the caller sees too"
                return [Unsupported("Tensor.__getitem__", "the module's result", reason, "return a clone of it")]
        return []


def _at_zero(item: Any) -> Any:
    return torch.ops.tvm_dispatch.position(item) if _is_number(item) else item


class SymbolicNumberIndices(TorchFunctionMode):
    """While forward is exported: 0-d integer tensors in an index are numbers that nothing is known of."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__getitem__:
            return _get(*args)
        if func is torch.Tensor.__setitem__ and not overlaps_itself(args[0]):
            return _set(*args)
        return func(*args, **(kwargs or {}))


class PositionsAreZero(TorchDispatchMode):
    """While an exported graph runs on fake tensors: numbers that nothing is known of are 0."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return 0 if func is aten._local_scalar_dense.default else func(*args, **(kwargs or {}))


def computes_with_numbers(graph: fx.Graph) -> bool:
    """Whether a traced graph takes numbers out of tensors for something else than a position."""
    reads, takes = (aten.item.default, aten._local_scalar_dense.default), (aten.select.int, aten.select_scatter.default)
    numbers = (node for node in graph.nodes if node.target in reads)
    return any(user.target not in takes for node in numbers for user in node.users)


def _get(x: torch.Tensor, index: Any) -> torch.Tensor:
    found = _last_number(x, index)
    if found is None:
        return x[index]
    dim, number, rest = found
    return _get(torch.select(x, dim, aten.item.default(number)), rest)


def _set(x: torch.Tensor, index: Any, value: Any) -> None:
    """Written back whole: ``select`` at a number that nothing is known of cannot be written through under autograd."""
    found = _last_number(x, index)
    if found is None:
        x[index] = value
        return
    dim, number, rest = found
    part = torch.select(x, dim, aten.item.default(number)).clone()
    _set(part, rest, value)
    aten.index_put_.default(x, [*[None] * dim, number.long()], part)


def _last_number(x: torch.Tensor, index: Any) -> tuple[int, torch.Tensor, tuple] | None:
    """The last 0-d integer tensor of an index, with the axis that it is for and the rest of the index."""
    items = _items(index)
    place = max((place for place, item in enumerate(items) if _is_number(item)), default=None)
    if place is None:
        return None
    before, rest = sum(map(_axes, items[:place])), items[:place] + items[place + 1 :]
    if any(item is Ellipsis for item in items[:place]):
        before += x.dim() - sum(map(_axes, items))
    return (before, items[place], rest) if 0 <= before < x.dim() else None


def _axes(item: Any) -> int:
    """How many axes an item of an index is for; those of an ellipsis are left over by the others."""
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    is_mask = isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8)
    return item.dim() if is_mask else 1
