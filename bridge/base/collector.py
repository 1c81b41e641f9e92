"""Garbage collector: a stretch of work that makes many objects and hardly any cyclic garbage → cheap collections.

Python collects whenever enough objects have been made, and each full collection walks through all objects of the
process: with torch, TVM and transformers imported that took a sixth of the time of adding a model, and found nothing.

The C library's heap: free pages that it keeps → given back to the system.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

__all__ = ["are_frozen", "collection_paused", "give_back_pages", "only_new_objects_collected"]

#: Python 3.12 counts its immortal objects (375 tuples of builtin types) as frozen after every full collection.
#: Whoever freezes objects freezes the interpreter's thousands too.
_IMMORTAL = 1000 if sys.version_info[:2] == (3, 12) else 0

_OURS: list[bool] = []
"""One for each stretch of work whose objects are frozen by :func:`only_new_objects_collected`."""


def _has_frozen() -> bool:
    """Whether somebody has frozen objects himself; takes as long as counting them."""
    return gc.get_freeze_count() > _IMMORTAL


def are_frozen() -> bool:
    """Whether :func:`only_new_objects_collected` has frozen the objects that there were before it."""
    return bool(_OURS)


@contextmanager
def only_new_objects_collected() -> Iterator[None]:
    """While active, collections pass over the objects that there were before; garbage among them goes afterwards.

    Where somebody has frozen objects himself (before a fork, say), nothing changes: they could not be told apart.
    """
    if _has_frozen():
        yield
        return
    gc.freeze()
    _OURS.append(True)
    try:
        yield
    finally:
        _OURS.pop()
        gc.unfreeze()


@contextmanager
def collection_paused(*, objects_stay: bool = False) -> Iterator[None]:
    """While active, nothing is collected: around imports, whose objects stay.

    ``objects_stay``: inside of :func:`only_new_objects_collected` they are passed over, too; the next collection would
    walk through all of them.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if objects_stay and _OURS:
            gc.freeze()
        if enabled:
            gc.enable()


def give_back_pages() -> None:
    """Gives back the whole pages that are free, where the C library can (glibc); they are in between others' memory.

    A tensor that is freed leaves a hole. The small objects that live on, nodes of autograd's graph, take its beginning,
    and the next tensor of the size does not fit: a loop without a single tensor that stays fills the memory with holes.
    """
    if (trim := _trim()) is not None:
        trim(0)


@cache
def _trim() -> Any:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
