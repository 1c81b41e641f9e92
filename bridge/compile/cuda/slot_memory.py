"""Slot memory: results whose sizes vary → the same address at each call, whatever the size, while nobody holds them.

A slot is a private pool of torch's allocator with room for the largest so far. What is allocated in it while it is
empty begins where the room begins. There are as many slots as results are alive together: a second forward before a
backward gets the second one.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from bridge.base.torch_cuda import empty_strided, reinterpreted
from bridge.compile.cuda.pool_memory import PoolMemory
from bridge.compile.graphs.recorder import Form, nbytes

__all__ = ["SlotMemory", "pieces_of"]

_MOST_SLOTS = 4
"""Results of so many calls that are alive together; those of further ones lie anywhere."""
_GROWTH = 1.5
"""Of a slot's room, at least, where a size does not fit: there are few addresses until the largest size was there."""
_SMALL, _LARGE = 1 << 20, 10 << 20
"""Bytes: for one of more than the first and less than the second, torch's allocator sets twice the second aside."""
_ALIGNMENT = 512
"""Bytes, of torch's allocator."""


class _Slot:
    """One pool; ``held``: what is in it.

    Attributes:
        room: bytes.
    """

    def __init__(self) -> None:
        self.memory: PoolMemory | None = None
        self.room = 0
        self.held: StorageWeakRef | None = None

    @property
    def is_free(self) -> bool:
        return self.held is None or self.held.expired()


class SlotMemory:
    """Memory for one result, or for several that lie in one block, see :class:`bridge.compile.graphs.recorder.Memory`.

    Args:
        index: of the device, which is current.

    Attributes:
        grown: how often addresses have changed, because a size did not fit.
    """

    def __init__(self, index: int):
        self._index = index
        self._slots: list[_Slot] = []
        self._lock = threading.Lock()
        self.grown = 0

    def __call__(self, forms: Sequence[Form]) -> list[torch.Tensor]:
        if len(forms) == 1:
            return [self._placed(forms[0])]
        places, size = pieces_of(forms)
        block = self._placed(((size,), (1,), torch.uint8))
        typed: dict[torch.dtype, torch.Tensor] = {}
        made = []
        for (shape, strides, dtype), place in zip(forms, places, strict=True):
            base = typed.get(dtype)
            if base is None:
                base = typed[dtype] = block.view(dtype)
            made.append(reinterpreted(base, shape, strides, place // dtype.itemsize))
        return made

    @property
    def held_bytes(self) -> int:
        return sum(slot.memory.held_bytes for slot in tuple(self._slots) if slot.memory is not None)

    def _placed(self, form: Form) -> torch.Tensor:
        """A tensor at the beginning of a free slot."""
        if not self._lock.acquire(blocking=False):  # torch lets one thread at a time use a pool
            return empty_strided(*form)
        try:
            slot = self._free()
            if slot is None:
                return empty_strided(*form)
            size = nbytes(form)
            if size > slot.room:
                self._grow(slot, size)
            (made,) = slot.memory([form])
            slot.held = StorageWeakRef(made.untyped_storage())
            return made
        finally:
            self._lock.release()

    def _free(self) -> _Slot | None:
        for slot in self._slots:
            if slot.is_free:
                return slot
        if len(self._slots) == _MOST_SLOTS:
            return None
        self._slots.append(slot := _Slot())
        return slot

    def _grow(self, slot: _Slot, size: int) -> None:
        """A new pool with room for this size; the old one's memory goes back to the device."""
        self.grown += slot.room > 0
        slot.room = max(size, int(_GROWTH * slot.room))
        if slot.room > _SMALL:
            slot.room = max(slot.room, _LARGE)
        slot.memory = PoolMemory(self._index)
        slot.memory([((slot.room,), (1,), torch.uint8)])


def pieces_of(forms: Sequence[Form]) -> tuple[list[int], int]:
    """Where in one block tensors of these forms lie, aligned, and how many bytes it has."""
    places, size = [], 0
    for form in forms:
        places.append(size)
        size += -(-nbytes(form) // _ALIGNMENT) * _ALIGNMENT
    return places, max(size, _ALIGNMENT)
