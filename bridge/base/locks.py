"""Locks that a fork leaves free: a child has none of its parent's other threads, to let go of what they held."""

from __future__ import annotations

import os
import threading
from typing import TypeVar

__all__ = ["free_in_children"]

Lock = TypeVar("Lock", bound="threading.Lock | threading.RLock")


def free_in_children(lock: Lock) -> Lock:
    """A lock that a forked child finds free: whoever forks waits for it. For locks that live as long as the process."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
    return lock
