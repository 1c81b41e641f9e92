"""Races of a GPU: several writes to one place → eager with another order of them, where torch defines none.

torch leaves the result of ``scatter``, and of ``index_put``, ``index_copy`` and ``put`` without ``accumulate``,
undefined where an index occurs twice. On the CPU the last write wins; on a GPU eager's winners vary from run to run
(observed: of 120 places written twice, the first write won in none or in 8).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.operator_mode import OperatorMode

aten = torch.ops.aten

_ALONG = {aten.scatter.src, aten.scatter_.src}
"""Take a dimension, an index of the source's shape and the source."""
_COPIES = {aten.index_copy.default, aten.index_copy_.default}
"""Take a dimension, positions along it and the source."""
_PUTS = {aten.index_put.default, aten.index_put_.default}
"""Take an index for each dimension or none, and values."""
_FLAT = {aten.put.default, aten.put_.default}
"""Take positions in the flattened tensor, and values."""


class Races(OperatorMode):
    """Runs racing writes in another order, by ``seed``; ``met``: operators whose results then differ."""

    def __init__(self, seed: int):
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)
        self.met: set[str] = set()

    def operator(self, func, args, kwargs):
        given = [arg.clone() if isinstance(arg, Tensor) else arg for arg in args]
        result = func(*args, **kwargs)
        turned = self._turned(func, given, kwargs)
        if turned is None:
            return result
        other = func(*turned, **kwargs)
        if torch.equal(other.nan_to_num(), result.nan_to_num()):
            return result
        self.met.add(func.overloadpacket.__name__.rstrip("_"))
        return result.copy_(other) if result is args[0] else other

    def _turned(self, func: Any, args: list[Any], kwargs: dict[str, Any]) -> list[Any] | None:
        """The arguments with the writes in another order; ``None`` for operators without racing writes, or sums."""
        if func in _ALONG:
            x, dim, index, source = args
            if not index.dim() or source.shape != index.shape:
                return None
            order = self._order(index.shape[dim], index)
            return [x, dim, index.index_select(dim, order), source.index_select(dim, order)]
        if func in _COPIES:
            x, dim, index, source = args
            if not index.dim() or not source.dim():
                return None
            order = self._order(len(index), index)
            return [x, dim, index[order], source.index_select(dim, order)]
        if (args[3] if len(args) > 3 else kwargs.get("accumulate", False)) is True:
            return None
        if func in _FLAT:
            x, index, source = args[:3]
            order = self._order(index.numel(), index)
            return [x, index.reshape(-1)[order], source.reshape(-1)[order]]
        return self._turned_put(args) if func in _PUTS else None

    def _turned_put(self, args: list[Any]) -> list[Any] | None:
        x, indices, values = args[:3]
        tensors = [index for index in indices if index is not None]
        if any(index.dtype in (torch.bool, torch.uint8) for index in tensors) or len(tensors) < len(indices):
            return None
        shape = torch.broadcast_shapes(*(index.shape for index in tensors))
        count, rest = shape.numel(), x.shape[len(tensors) :]
        order = self._order(count, x)
        flat = values.expand(*shape, *rest).reshape(count, *rest)[order]
        return [x, [index.expand(shape).reshape(-1)[order] for index in tensors], flat]

    def _order(self, count: int, like: Tensor) -> Tensor:
        return torch.randperm(count, generator=self._generator).to(like.device)
