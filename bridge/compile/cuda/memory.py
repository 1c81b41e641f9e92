"""Memory of recorded graphs: results in private pools of torch's allocator, at the same address at each call.

Private pools of torch's allocator: memory for one owner's allocations, which returns to the device with the owner.
torch ends the whole process when a ``torch.cuda.MemPool`` is destroyed while any thread allocates from a pool of the
device: the destructor synchronizes, the allocator then refuses, and a destructor's error cannot be caught. The owner's
last reference may go even inside another allocation, by garbage collection, so a pool may outlive its owner.

Slot memory: results of dynamic size → the same address at each call, whatever the size, while no earlier result is
alive. A slot is a private pool of torch's allocator with room for the largest size so far. Its first allocation while
it is empty begins at its start. If several results share a slot, each has room for its own largest size, so that none
moves when another one grows. There are as many slots as results alive at once: a second forward before a backward gets
the second slot.
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
"""Held while a thread begins or ends to allocate from a pool, and while pools are destroyed."""
_PROCESS = os.getpid()


class _Pools:
    """Pools in use and pools to destroy.

    Attributes:
        in_use: number of threads that allocate from pools now.
        left: ``(index of the device, pool)`` of pools without an owner.
    """

    def __init__(self) -> None:
        self.in_use = 0
        self.left: deque[tuple[int, list[Any]]] = deque()


_POOLS = _Pools()
"""The process's pools."""


class PrivatePool:
    """A pool of the current device; inside its context, this thread allocates from it.

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
        """Its memory, as reported by ``torch.cuda.memory_snapshot``."""
        return torch.cuda.memory_snapshot(self._id)

    @property
    def held_bytes(self) -> int:
        """Bytes of its segments."""
        return sum(segment["total_size"] for segment in self.segments())


def _leave(index: int, held: list[Any]) -> None:
    """Destroys an ownerless pool now, or when no thread allocates from a pool any more."""
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
    """Whether this thread's memory on the current device comes from torch's common pool, not a user's or a graph's."""
    if torch.cuda.is_current_stream_capturing():
        return False
    try:
        return takes_from(_common_segments)
    except RuntimeError:  # out of memory
        return False


def takes_from(segments: Callable[[], Iterable[Mapping[str, Any]]]) -> bool:
    """Whether a new allocation of this thread on the current device lies in one of these segments, which are listed
    after the allocation: it may open a new one.

    Allocates no tensor: garbage collection runs anywhere, also where torch's modes make tensors without memory.
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
"""Maximum part of a device's memory for results of recorded programs, and at most half of the free memory."""


class PoolMemory:
    """Memory of a private pool, see :class:`bridge.compile.graphs.recordings.Memory`; for the current device.

    Falls back to ordinary memory with an allocator without pools, or while another thread is using this pool.

    Args:
        joined: tensors requested together are freed together: they share one allocation.

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
            except torch.OutOfMemoryError:  # the allocator frees no cached memory while a pool is in use
                pass
            finally:
                self._lock.release()
        return [empty_strided(*form) for form in forms]

    @property
    def held_bytes(self) -> int:
        return 0 if self._pool is None else self._pool.held_bytes


def bytes_of(forms: Sequence[Form]) -> list[int]:
    """Bytes of each tensor, aligned."""
    return [max(-(-nbytes(form) // ALIGNMENT), 1) * ALIGNMENT for form in forms]


def places_of(rooms: Sequence[int]) -> list[int]:
    """The beginnings of ``rooms`` in a block."""
    return [0, *itertools.accumulate(rooms[:-1])]


def pieces_of(block: torch.Tensor, forms: Sequence[Form], places: Sequence[int]) -> list[torch.Tensor]:
    """Tensors with this metadata in a block of bytes."""
    typed: dict[torch.dtype, torch.Tensor] = {}
    made = []
    for (shape, strides, dtype), place in zip(forms, places, strict=True):
        base = typed.get(dtype)
        if base is None:
            base = typed[dtype] = block.view(dtype)
        made.append(reinterpreted(base, shape, strides, place // dtype.itemsize))
    return made


_MEMORIES: weakref.WeakSet[PoolMemory] = weakref.WeakSet()
"""All pool memories; their total bytes are bounded."""

_SPARE: dict[int, int] = {}
"""Device → spare bytes at the last query of the driver, minus later requests."""
_CERTAIN = 4
"""If that many times the request was spare at the last query, the request surely fits: a query takes milliseconds, and
each new size of a program requests memory."""


def spare_bytes(index: int, wanted: int) -> int:
    """Bytes of results that may be reserved on a device.

    Args:
        wanted: the request, which counts as reserved from now on.
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
"""Calls whose results may be alive at once in slots; further results are in ordinary memory."""
_GROWTH = 1.5
"""Growth factor of a room that is too small: it keeps the number of addresses low until the largest size occurs."""
_SMALL, _LARGE = 1 << 20, 10 << 20
"""Bytes: between these sizes, torch's allocator reserves twice the larger one."""
_MOST_KNOWN = 256
"""Lists of metadata whose bytes are cached."""


class _Slot:
    """One pool; ``held``: the storage in it.

    Attributes:
        rooms: bytes for each result in it; ``places``: beginnings of the rooms.
        block: the whole slot.
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
        grown: how often addresses changed because a size did not fit.
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
            if len(forms) == 1:  # with memory of its own size only: a caller may keep it, or save it
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
        """Cached: a caller has one list of metadata for each size."""
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
        """A new pool for ``rooms``; the old one's memory returns to the device."""
        self.grown += bool(slot.rooms)
        size = sum(rooms)
        slot.rooms, slot.places, slot.block = rooms, places_of(rooms), [((size,), (1,), torch.uint8)]
        if size > _SMALL:
            size = max(size, _LARGE)
        slot.memory = PoolMemory(self._index)
        slot.memory([((size,), (1,), torch.uint8)])


def rooms_of(sizes: Sequence[int], before: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Bytes for each of several results in one block: ``before`` if all fit.

    Otherwise all nearly full rooms grow: one program's results grow together. Ignores ``before`` of another length.
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
