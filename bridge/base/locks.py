"""Locks that a fork leaves free: a child has none of its parent's other threads, to let go of what they held."""

from __future__ import annotations

import os
import threading
from typing import TypeVar

__all__ = ["free_in_children"]

Lock = TypeVar("Lock", bound="threading.Lock | threading.RLock")

_LOCKS: list[threading.Lock | threading.RLock] = []
_held: list[threading.Lock | threading.RLock] = []
"""By the thread that forks, while it does."""


def free_in_children(lock: Lock) -> Lock:
    """A lock that a forked child finds free: whoever forks waits for it. For locks that live as long as the process."""
    _LOCKS.append(lock)
    return lock


def _acquire_all() -> None:
    """Holds all locks. It waits for one while it holds no other, so that threads may nest them in any order."""
    global _held
    awaited = None
    while True:
        held = []
        try:
            if awaited is not None:
                awaited.acquire()
                held.append(awaited)
            awaited = _acquire_others(held)
        except BaseException:
            _release(held)
            raise
        if awaited is None:
            _held = held
            return
        _release(held)


def _acquire_others(held: list[threading.Lock | threading.RLock]) -> threading.Lock | threading.RLock | None:
    """Adds to the locks that are held those that are free → the first that is not, or ``None``."""
    for lock in list(_LOCKS):
        if lock not in held:
            if not lock.acquire(blocking=False):
                return lock
            held.append(lock)
    return None


def _release_all() -> None:
    global _held
    held, _held = _held, []
    _release(held)


def _release(held: list[threading.Lock | threading.RLock]) -> None:
    for lock in reversed(held):
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_acquire_all, after_in_parent=_release_all, after_in_child=_release_all)
