"""Arena pool: memory for intermediates that all programs of a process share.

A run takes a *block* and gives it back; nobody else has it meanwhile, so concurrent and re-entrant runs never share
memory. Runs one after another take the same block: what is held is the largest arena, not the sum, once for each of the
runs that were under way together. Taking and giving back are single operations on a list, which Python's global
interpreter lock makes atomic: no lock that a signal handler, a finalizer or a forked child could find taken.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from bridge.base.devices import HOST
from bridge.compile.runtime.layout import ALIGNMENT

__all__ = ["ARENAS", "ArenaPool", "PoolBlock"]

_USES = 256
"""So many times a block is taken before those that were free each time are let go."""


class PoolBlock:
    """``memory``, uint8 [size], aligned; ``bound``: what users keep with it, by key."""

    __slots__ = ("__weakref__", "bound", "memory", "size")

    def __init__(self, size: int, device: torch.device = HOST):
        raw = torch.empty(size + ALIGNMENT, dtype=torch.uint8, device=device)
        begin = -raw.data_ptr() % ALIGNMENT
        self.memory = raw[begin : begin + size]
        self.size = size
        self.bound: dict[int, Any] = {}


class ArenaPool:
    """Blocks on a device for the runs of any number of users, each of whom needs up to a size of its own.

    Memory is given back to torch's allocator when a larger block takes a block's place, when blocks stay free for long
    while others are taken, and when no living user needs one as large.

    Attributes:
        give: takes a block back.
    """

    def __init__(self, device: torch.device = HOST) -> None:
        self._device = device
        self._free: list[PoolBlock] = []
        self.give: Callable[[PoolBlock], None] = self._free.append
        self._blocks: list[weakref.ref[PoolBlock]] = []  # those in use too
        self._users: dict[int, tuple[weakref.ref, int]] = {}
        self._keys = itertools.count()
        self._left, self._uses = _USES, 0  # the fewest blocks left free, among so many uses

    def enroll(self, user: object, size: int) -> int:
        """The user's key in ``bound`` of a block; what is kept under it is dropped when the user is gone."""
        key = next(self._keys)
        self._users[key] = weakref.ref(user, lambda _: self._gone(key)), size
        return key

    def take(self, size: int) -> PoolBlock:
        """A block of at least ``size`` bytes for the caller alone, to be given back."""
        free = self._free
        try:
            block = free.pop()
        except IndexError:
            return self._allocate(size)
        if free or block.size < size:
            free.append(block)
            return self._choose(size)
        self._left = 0
        return block

    @property
    def held_bytes(self) -> int:
        """Bytes of all blocks."""
        return sum(block.size for block in self._living())

    @property
    def free_bytes(self) -> int:
        """Bytes of the blocks that nobody has."""
        return sum(block.size for block in tuple(self._free))

    def clear(self) -> None:
        """Gives back the blocks that nobody has."""
        self._free.clear()

    def _choose(self, size: int) -> PoolBlock:
        """The smallest free block that is large enough; if none is, the largest makes room for a new one."""
        block = self._fitting(size)
        return self._allocate(size) if block is None else block

    def _fitting(self, size: int) -> PoolBlock | None:
        by_size = sorted(self._free, key=lambda block: block.size)
        for block in by_size:
            if block.size >= size and self._out(block):
                self._let_go()
                return block
        any(map(self._out, reversed(by_size)))  # up to the first that nobody else has taken
        return None

    def _out(self, block: PoolBlock) -> bool:
        """Takes a certain block out of the free ones; false if somebody was faster."""
        try:
            self._free.remove(block)
        except ValueError:
            return False
        return True

    def _let_go(self) -> None:
        """Counts a use that left blocks free, and after enough of them drops the smallest of those never needed."""
        self._left = min(self._left, len(self._free))
        self._uses += 1
        if self._uses >= _USES:
            for block in sorted(self._free, key=lambda block: block.size)[: self._left]:
                self._out(block)
            self._left, self._uses = _USES, 0

    @torch.inference_mode(False)  # it serves runs of any mode
    def _allocate(self, size: int) -> PoolBlock:
        self._left = 0
        block = PoolBlock(size, self._device)
        self._blocks.append(weakref.ref(block, self._blocks.remove))
        return block

    def _living(self) -> list[PoolBlock]:
        return [block for reference in tuple(self._blocks) if (block := reference()) is not None]

    def _gone(self, key: int) -> None:
        """Drops what a user kept, and free blocks that are larger than any living user needs."""
        self._users.pop(key, None)
        for block in self._living():
            block.bound.pop(key, None)
        largest = max((size for _, size in tuple(self._users.values())), default=-1)
        for block in tuple(self._free):
            if block.size > largest:
                self._out(block)


ARENAS = ArenaPool()
"""The host's pool."""
