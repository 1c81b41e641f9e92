"""Memory of recorded graphs: results in private pools of torch's allocator, at the same address at each call.

Private pools of torch's allocator: memory for one owner's allocations, which goes back to the device with the owner.
torch ends the whole process when a ``torch.cuda.MemPool`` is destroyed while any thread takes memory from a pool of the
device: the destructor synchronizes, which the allocator refuses then, and a destructor's error is nobody's to catch. An
owner goes whenever its last reference goes: inside of somebody else's allocation too, where Python happens to collect
garbage. So a pool outlives its owner until it may be destroyed.

Slot memory: results whose sizes vary → the same address at each call, whatever the size, while nobody holds them.
A slot is a private pool of torch's allocator with room for the largest so far. What is allocated in it while it is
empty begins where the room begins. Where several results lie in one slot, each has room for its own largest, so that
none moves when another one is longer. There are as many slots as results are alive together: a second forward before a
backward gets the second one.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from bridge.base.lru import LeastRecentlyUsed
from bridge.base.threads import free_in_children
from bridge.base.torch_cuda import empty_strided, memory_of_pool, reinterpreted
from bridge.compile.graphs.recordings import Form, nbytes

__all__ = ["ALIGNMENT", "PoolMemory", "PrivatePool", "SlotMemory", "bytes_of", "pieces_of", "places_of", "rooms_of"]
__all__ += ["spare_bytes", "takes_from"]

_LOCK = free_in_children(threading.RLock())
"""Held where a thread begins or ends to take memory from a pool, and while pools are destroyed."""
_PROCESS = os.getpid()


class _Pools:
    """Pools in use and pools to destroy.

    Attributes:
        in_use: how many threads take memory from pools now.
        left: with their devices' indices, the pools whose owners are gone.
    """

    def __init__(self) -> None:
        self.in_use = 0
        self.left: deque[tuple[int, list[Any]]] = deque()


_POOLS = _Pools()
"""Of this process."""


class PrivatePool:
    """A pool of a device that is current; used as a context, this thread's memory comes from it.

    torch lets one thread at a time use a pool.

    Args:
        index: of the device.
    """

    def __init__(self, index: int):
        pool = torch.cuda.MemPool()
        self._id = pool.id
        self._redirected = memory_of_pool(index, self._id)
        weakref.finalize(self, _leave, index, [pool]).atexit = False

    def __enter__(self) -> None:
        with _LOCK:
            _POOLS.in_use += 1
            self._redirected.__enter__()

    def __exit__(self, *error: object) -> None:
        with _LOCK:
            self._redirected.__exit__(*error)
            _POOLS.in_use -= 1
            if _POOLS.left:
                _destroy_left()

    def segments(self) -> list[dict[str, Any]]:
        """Its memory, as ``torch.cuda.memory_snapshot`` tells it."""
        return torch.cuda.memory_snapshot(self._id)

    @property
    def held_bytes(self) -> int:
        """Bytes of its segments."""
        return sum(segment["total_size"] for segment in self.segments())


def _leave(index: int, held: list[Any]) -> None:
    """The owner is gone: its pool is destroyed now, or when no thread takes memory from a pool any more."""
    _POOLS.left.append((index, held))
    with _LOCK:
        _destroy_left()


def _destroy_left() -> None:
    if _POOLS.in_use or os.getpid() != _PROCESS:  # a forked child has no device
        return
    for _ in range(len(_POOLS.left)):
        index, held = _POOLS.left.popleft()
        with torch.cuda.device(index):
            if _memory_is_common():
                held.clear()
            else:
                _POOLS.left.append((index, held))


def _memory_is_common() -> bool:
    """Whether this thread's memory on the current device comes from no pool, one of the user's or of a graph that is
    captured."""
    if torch.cuda.is_current_stream_capturing():
        return False
    try:
        return takes_from(_common_segments)
    except RuntimeError:  # there is no memory
        return False


def takes_from(segments: Callable[[], Iterable[Mapping[str, Any]]]) -> bool:
    """Whether memory that this thread takes now, on the current device, lies in one of these segments; they are asked
    for afterwards, as it may be in a new one.

    It is no tensor: garbage is collected anywhere, also where torch's modes make tensors without memory.
    """
    address = torch.cuda.caching_allocator_alloc(1)
    try:
        return any(each["address"] <= address < each["address"] + each["total_size"] for each in segments())
    finally:
        torch.cuda.caching_allocator_delete(address)


def _common_segments() -> list[dict[str, Any]]:
    return [each for each in torch.cuda.memory_snapshot() if tuple(each["segment_pool_id"]) == (0, 0)]


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
