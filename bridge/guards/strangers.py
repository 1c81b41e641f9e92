"""Strangers: objects that forward read, to which no known place leads → those of them that were there before the run.

The garbage collector tells: while the run lasts, what was there before is frozen, and is none of what it lists. Where
the user has frozen objects, it lists those that are there before the run instead.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from bridge.base.collector import are_frozen
from bridge.base.threads import free_in_children
from bridge.guards.kinds import CONTAINERS, PLAIN, is_a
from bridge.guards.objects import FrameOf, Instance

__all__ = ["Strangers"]

_OWN_REFERENCES = 2
"""To an object that is looked at here: a variable, and an argument."""
_PYTHONS = 5000
"""More objects are frozen only where the user has frozen some; they stay so, and those that there are are listed."""
_lock = free_in_children(threading.Lock())
_frozen: list[bool] = []
"""An item for each run that lasts: whether the first of them has frozen."""
Read = tuple[Any, ...]


class Strangers:
    """Objects from nowhere known, and what was read of each: a method of the world and its arguments."""

    def __init__(self) -> None:
        self._held: dict[int, Any] = {}
        self._reads: dict[int, dict[Read, None]] = {}
        self._tells = False
        self._before: list[Any] = []

    @contextmanager
    def lifetimes(self) -> Iterator[None]:
        """While active, objects that are made can be told from those that were there before."""
        with _lock:
            freezes = _frozen[-1] if _frozen else not are_frozen() and gc.get_freeze_count() < _PYTHONS
            if freezes and not _frozen:
                gc.freeze()
            _frozen.append(freezes)
        self._before = [] if freezes else gc.get_objects()  # alive, so that no new one takes the place of one
        self._tells = True
        try:
            yield
        finally:
            self._tells = False
            self._before.clear()
            self._held.clear()
            self._reads.clear()
            with _lock:
                if _frozen.pop() and not _frozen:
                    gc.unfreeze()

    def note(self, value: Any, *read: Read) -> None:
        """Notes an object, and what is read of it; tensors, and what holds some, are the call's own."""
        if not self._tells or type(value) in PLAIN:
            return
        if (held := self._held.get(id(value))) is None or (is_a(held, weakref.ref) and held() is not value):
            if is_a(value, torch.Tensor | Instance | FrameOf | ModuleType | type):
                return
            if is_a(value, CONTAINERS):
                parts = dict.values(value) if is_a(value, dict) else value
                if any(is_a(each, torch.Tensor) for each in parts):
                    return
            try:
                self._held[id(value)] = weakref.ref(value)
            except TypeError:
                self._held[id(value)] = value
            self._reads[id(value)] = {}
        self._reads[id(value)].update(dict.fromkeys(read))

    def known_before(self) -> list[tuple[Any, list[Read]]]:
        """The objects that were there before, with what was read of each."""
        if not self._held:
            return []
        made, found = set(map(id, gc.get_objects())) - set(map(id, self._before)), []
        for of in list(self._held):
            value = self._held.pop(of)
            value = value() if is_a(value, weakref.ref) else value
            if value is None:
                continue
            if of not in made if gc.is_tracked(value) else sys.getrefcount(value) > _OWN_REFERENCES:
                found.append((value, list(self._reads[of])))
        return found
