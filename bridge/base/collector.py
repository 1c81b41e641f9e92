"""Garbage collector: a stretch of work that makes many objects and hardly any cyclic garbage → cheap collections.

Python collects whenever enough objects have been made, and each full collection walks through all objects of the
process: with torch, TVM and transformers imported that took a sixth of the time of adding a model, and found nothing.

C library's heap: its free pages → returned to the system.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

#: Python 3.12 counts its immortal objects (375 tuples of builtin types) as frozen after every full collection.
#: A user's ``gc.freeze`` freezes the interpreter's thousands of objects as well.
_IMMORTAL = 1000 if sys.version_info[:2] == (3, 12) else 0

_OURS: list[bool] = []
"""One for each active :func:`only_new_objects_collected`, which has frozen the older objects."""


def has_frozen() -> bool:
    """Whether the user has frozen objects; counts all frozen objects."""
    return gc.get_freeze_count() > _IMMORTAL


def are_frozen() -> bool:
    """Whether :func:`only_new_objects_collected` has frozen the objects from before it."""
    return bool(_OURS)


@contextmanager
def only_new_objects_collected() -> Iterator[None]:
    """While active, collections pass over older objects; garbage among them is collected afterwards.

    Does nothing where the user has frozen objects (before a fork, say): unfreezing would release those as well.
    """
    if has_frozen():
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
    """While active, nothing is collected: for imports, whose objects stay alive.

    ``objects_stay``: inside of :func:`only_new_objects_collected`, freezes the new objects as well; otherwise the next
    collection would walk through all of them.
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
    """Returns the heap's free pages, also those between used ones, to the system, where the C library can (glibc).

    A freed tensor leaves a hole. Small objects that stay alive (nodes of autograd's graph) take its beginning, and the
    next tensor of that size does not fit: a loop that keeps no tensor still fills the memory with holes.
    """
    if (trim := _trim()) is not None:
        trim(0)


@cache
def _trim() -> Any:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
