"""Slot memory: results whose sizes vary → the same address at each call, whatever the size, while nobody holds them.

A slot is a private pool of torch's allocator with room for the largest so far. What is allocated in it while it is
empty begins where the room begins. Where several results lie in one slot, each has room for its own largest, so that
none moves when another one is longer. There are as many slots as results are alive together: a second forward before a
backward gets the second one.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from bridge.base.lru import LeastRecentlyUsed
from bridge.base.torch_cuda import empty_strided
from bridge.compile.cuda.pool_memory import ALIGNMENT, PoolMemory, bytes_of, pieces_of, places_of
from bridge.compile.graphs.recordings import Form

__all__ = ["SlotMemory", "rooms_of"]

_MOST_SLOTS = 4
"""Results of so many calls that are alive together; those of further ones lie anywhere."""
_GROWTH = 1.5
"""Of a room, where a size does not fit: there are few addresses until the largest size was there."""
_SMALL, _LARGE = 1 << 20, 10 << 20
"""Bytes: for one of more than the first and less than the second, torch's allocator sets twice the second aside."""
_MOST_KNOWN = 256
"""Lists of forms whose bytes are remembered."""


class _Slot:
    """One pool; ``held``: what is in it.

    Attributes:
        rooms: bytes for each of the results that lie in it; ``places``: where each room begins.
        block: all of it.
    """

    def __init__(self) -> None:
        self.memory: PoolMemory | None = None
        self.rooms: tuple[int, ...] = ()
        self.places: list[int] = []
        self.block: list[Form] = []
        self.held: StorageWeakRef | None = None

    @property
    def is_free(self) -> bool:
        return self.held is None or self.held.expired()


class SlotMemory:
    """Memory for one result, or for several in one block, see :class:`bridge.compile.graphs.recordings.Memory`.

    Args:
        index: of the device, which is current.

    Attributes:
        grown: how often addresses have changed, because a size did not fit.
    """

    def __init__(self, index: int):
        self._index = index
        self._slots: list[_Slot] = []
        self._known: LeastRecentlyUsed[int, tuple[Sequence[Form], list[int]]] = LeastRecentlyUsed(_MOST_KNOWN)
        self._lock = threading.Lock()
        self.grown = 0

    def __call__(self, forms: Sequence[Form]) -> list[torch.Tensor]:
        if not self._lock.acquire(blocking=False):  # torch lets one thread at a time use a pool
            return _anywhere(forms)
        try:
            slot = self._free()
            if slot is None:
                return _anywhere(forms)
            rooms = rooms_of(self._bytes_of(forms), slot.rooms)
            if rooms is not slot.rooms:
                self._grow(slot, rooms)
            if len(forms) == 1:  # with memory of no more than its own size: a caller may keep it, or save it
                made = slot.memory(forms)
            else:
                (block,) = slot.memory(slot.block)
                made = pieces_of(block, forms, slot.places)
            slot.held = StorageWeakRef(made[0].untyped_storage())
            return made
        finally:
            self._lock.release()

    @property
    def held_bytes(self) -> int:
        return sum(slot.memory.held_bytes for slot in tuple(self._slots) if slot.memory is not None)

    def _bytes_of(self, forms: Sequence[Form]) -> list[int]:
        """Remembered: whoever asks has one list of forms for each size."""
        known = self._known.get(id(forms))
        return (known or self._known.put(id(forms), (forms, bytes_of(forms))))[1]

    def _free(self) -> _Slot | None:
        for slot in self._slots:
            if slot.is_free:
                return slot
        if len(self._slots) == _MOST_SLOTS:
            return None
        self._slots.append(slot := _Slot())
        return slot

    def _grow(self, slot: _Slot, rooms: tuple[int, ...]) -> None:
        """A new pool with room for these; the old one's memory goes back to the device."""
        self.grown += bool(slot.rooms)
        size = sum(rooms)
        slot.rooms, slot.places, slot.block = rooms, places_of(rooms), [((size,), (1,), torch.uint8)]
        if size > _SMALL:
            size = max(size, _LARGE)
        slot.memory = PoolMemory(self._index)
        slot.memory([((size,), (1,), torch.uint8)])


def rooms_of(sizes: Sequence[int], before: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Bytes for each of several results that lie in one block: ``before`` where all fit.

    Where one does not, all that are near their end get more: of one program, they grow together. ``before`` of another
    number of results is nobody's.
    """
    if len(before) != len(sizes):
        return tuple(sizes)
    if all(map(int.__le__, sizes, before)):
        return before
    return tuple(
        room if _GROWTH * size <= room else max(size, -(-int(_GROWTH * room) // ALIGNMENT) * ALIGNMENT)
        for size, room in zip(sizes, before, strict=True)
    )


def _anywhere(forms: Sequence[Form]) -> list[torch.Tensor]:
    return [empty_strided(*form) for form in forms]
