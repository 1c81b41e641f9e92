"""LRU cache: a mapping with a bounded size and cost, which evicts the least recently used entries first."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Hashable
from typing import Generic, TypeVar

from bridge.base.threads import free_in_children

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

_LOCK = free_in_children(threading.Lock())
"""Held while any mapping inserts or evicts: microseconds."""


class LeastRecentlyUsed(Generic[Key, Value]):
    """Values by key. Threads may share it, and processes may fork: lookups take no lock.

    Args:
        most: the largest number of values.
        budget: the largest total cost; the last inserted value stays at any cost.

    Example:
        >>> squares = LeastRecentlyUsed(2)
        >>> _ = squares.put(2, 4), squares.put(3, 9), squares.get(2), squares.put(5, 25)
        >>> squares.get(2), squares.get(3)
        (4, None)
    """

    def __init__(self, most: int, budget: float = float("inf")):
        self._most, self._budget = most, budget
        self._held: dict[Key, _Held[Value]] = {}
        self._clock = itertools.count()
        self.cost = 0

    def get(self, key: Key) -> Value | None:
        """The value, which counts as used now, or ``None``."""
        held = self._held.get(key)
        if held is None:
            return None
        held.used = next(self._clock)
        return held.value

    def put(self, key: Key, value: Value, cost: int = 0) -> Value:
        """Inserts a value and returns it; returns the existing value if another thread was faster."""
        with _LOCK:
            found = self._held.get(key)
            if found is not None:
                return found.value
            self._held[key] = _Held(value, cost, next(self._clock))
            self.cost += cost
            if len(self._held) > self._most or self.cost > self._budget:
                self._evict(key)
        return value

    def _evict(self, last: Key) -> None:
        """Drops the least recently used values but ``last``; a sixteenth more than are too many, since the search for
        them sorts all."""
        more = len(self._held) // 16
        for dropped, key in enumerate(sorted(self._held, key=self._used)):
            if len(self._held) <= self._most and self.cost <= self._budget and dropped > more:
                return
            if key != last:
                self.cost -= self._held.pop(key).cost

    def clear(self) -> None:
        """Forgets all values; values in use stay alive."""
        with _LOCK:
            self._held.clear()
            self.cost = 0

    def items(self) -> list[tuple[Key, Value]]:
        """Keys and values, the most recently used last."""
        with _LOCK:
            return [(key, self._held[key].value) for key in sorted(self._held, key=self._used)]

    def values(self) -> list[Value]:
        """Values in any order."""
        return [held.value for held in tuple(self._held.values())]

    def __len__(self) -> int:
        return len(self._held)

    def _used(self, key: Key) -> int:
        return self._held[key].used


class _Held(Generic[Value]):
    __slots__ = ("cost", "used", "value")

    def __init__(self, value: Value, cost: int, used: int):
        self.value, self.cost, self.used = value, cost, used
