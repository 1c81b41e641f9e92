"""Private pools of torch's allocator: memory for one owner's allocations, which goes back to the device with the owner.

torch ends the whole process when a ``torch.cuda.MemPool`` is destroyed while any thread takes memory from a pool of the
device: the destructor synchronizes, which the allocator refuses then, and a destructor's error is nobody's to catch. An
owner goes whenever its last reference goes: inside of somebody else's allocation too, where Python happens to collect
garbage. So a pool outlives its owner until it may be destroyed.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from bridge.base.locks import free_in_children
from bridge.base.torch_cuda import memory_of_pool

__all__ = ["PrivatePool", "takes_from"]

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
