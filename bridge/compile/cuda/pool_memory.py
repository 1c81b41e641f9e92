"""Pool memory: results of recorded programs in private pools of torch's allocator, and how much of it there may be."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Sequence

import torch

from bridge.base.torch_cuda import empty_strided, reinterpreted
from bridge.compile.cuda.private_pool import PrivatePool
from bridge.compile.graphs.recordings import Form, nbytes

__all__ = ["ALIGNMENT", "PoolMemory", "bytes_of", "pieces_of", "places_of", "spare_bytes"]

ALIGNMENT = 512
"""Bytes, of torch's allocator."""

_SHARE = 1 / 8
"""Of a device's memory, for results of recorded programs; no more of what is free than half."""


class PoolMemory:
    """Memory of a private pool, see :class:`bridge.compile.graphs.recordings.Memory`; of a device that is current.

    Where it cannot be had, memory is like any other: an allocator of another kind than torch's own has no pools, and
    another thread may be using this one.

    Args:
        joined: what is asked for together is let go together: it lies in one block, which is one allocation.

    Attributes:
        index: of the device.
    """

    grown = 0

    def __init__(self, index: int, joined: bool = False):
        self.index, self._joined = index, joined
        self._planned: tuple[Sequence[Form], list[int], list[Form]] = (), [], []
        self._pool: PrivatePool | None = None
        _MEMORIES.add(self)
        self._lock = threading.Lock()
        self._has_pools = torch.cuda.get_allocator_backend() == "native"

    def __call__(self, forms: Sequence[Form]) -> list[torch.Tensor]:
        if self._joined and len(forms) > 1:
            planned, places, block = self._planned
            if planned is not forms:
                sizes = bytes_of(forms)
                places, block = places_of(sizes), [((sum(sizes),), (1,), torch.uint8)]
                self._planned = forms, places, block
            return pieces_of(self._taken(block)[0], forms, places)
        return self._taken(forms)

    def _taken(self, forms: Sequence[Form]) -> list[torch.Tensor]:
        if self._has_pools and self._lock.acquire(blocking=False):  # torch lets one thread at a time use a pool
            try:
                if self._pool is None:
                    self._pool = PrivatePool(self.index)
                with self._pool:
                    return [empty_strided(*form) for form in forms]
            except torch.OutOfMemoryError:  # the allocator gives nothing back that it keeps while a pool is in use
                pass
            finally:
                self._lock.release()
        return [empty_strided(*form) for form in forms]

    @property
    def held_bytes(self) -> int:
        return 0 if self._pool is None else self._pool.held_bytes


def bytes_of(forms: Sequence[Form]) -> list[int]:
    """Of each tensor, aligned."""
    return [max(-(-nbytes(form) // ALIGNMENT), 1) * ALIGNMENT for form in forms]


def places_of(rooms: Sequence[int]) -> list[int]:
    """Where in a block each of these begins."""
    return [0, *itertools.accumulate(rooms[:-1])]


def pieces_of(block: torch.Tensor, forms: Sequence[Form], places: Sequence[int]) -> list[torch.Tensor]:
    """Tensors of these forms in a block of bytes."""
    typed: dict[torch.dtype, torch.Tensor] = {}
    made = []
    for (shape, strides, dtype), place in zip(forms, places, strict=True):
        base = typed.get(dtype)
        if base is None:
            base = typed[dtype] = block.view(dtype)
        made.append(reinterpreted(base, shape, strides, place // dtype.itemsize))
    return made


_MEMORIES: weakref.WeakSet[PoolMemory] = weakref.WeakSet()
"""All there are: what they hold together is bounded."""


_SPARE: dict[int, int] = {}
"""By device, what was spare when the driver was asked last, less what was wanted since."""
_CERTAIN = 4
"""Times what is wanted, that is surely still spare where it was when the driver was asked: that takes it milliseconds,
and each new size of a program wants some."""


def spare_bytes(index: int, wanted: int) -> int:
    """Bytes of results that may be set aside on a device.

    Args:
        wanted: by who asks; from now on it is not spare.
    """
    spare = _SPARE.get(index, 0)
    if spare < _CERTAIN * wanted:
        free, total = torch.cuda.mem_get_info(index)
        free += torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)
        held = sum(memory.held_bytes for memory in tuple(_MEMORIES) if memory.index == index)
        spare = min(free // 2, int(_SHARE * total) - held)
    _SPARE[index] = spare - wanted
    return spare
