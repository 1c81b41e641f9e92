"""Weak cache: source → what was made from an equal source and is still in use.

Two functions are the same if they are structurally equal, so a cache is a table of hashes with a few candidates each.
It holds what was made weakly: when the last module that uses a program is gone, so are its kernels' machine code and
its arena.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

__all__ = ["WeakCache"]

Source = TypeVar("Source")
Made = TypeVar("Made")


class WeakCache(Generic[Source, Made]):
    """What was made from a source, found by a key and equality of the sources.

    Args:
        equal: whether two sources of one key are the same.
        usable: whether something made may still be given out.

    Not synchronized: callers hold a lock of theirs around each call.
    """

    def __init__(self, equal: Callable[[Source, Source], bool], usable: Callable[[Made], bool] = lambda made: True):
        self._equal = equal
        self._usable = usable
        self._entries: dict[Hashable, list[tuple[Source, weakref.ref[Made]]]] = {}
        self._gone: deque[Hashable] = deque()  # filled whenever the garbage collector runs; emptied by the callers

    def get(self, key: Hashable, source: Source) -> Made | None:
        """What was made from an equal source and is in use, or ``None``."""
        for known, reference in self._entries.get(key, ()):
            made = reference()
            if made is not None and self._usable(made) and self._equal(source, known):
                return made
        return None

    def put(self, key: Hashable, source: Source, made: Made) -> None:
        """Remembers what was made from a source until nobody uses it."""
        self._drop_gone()
        gone = self._gone
        reference = weakref.ref(made, lambda _: gone.append(key))
        self._entries.setdefault(key, []).append((source, reference))

    def clear(self) -> None:
        """Forget everything; who uses it keeps it."""
        self._entries.clear()

    def __len__(self) -> int:
        """Number of things in use."""
        self._drop_gone()
        return sum(map(len, self._entries.values()))

    def _drop_gone(self) -> None:
        while self._gone:
            key = self._gone.popleft()
            alive = [entry for entry in self._entries.pop(key, ()) if entry[1]() is not None]
            if alive:
                self._entries[key] = alive
