"""Garbage collector: a stretch of work that makes many objects and hardly any cyclic garbage → cheap collections.

Python collects whenever enough objects have been made, and each full collection walks through all objects of the
process: with torch, TVM and transformers imported that took a sixth of the time of adding a model, and found nothing.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collection_paused", "only_new_objects_collected"]

#: Python 3.12 counts its immortal objects (375 tuples of builtin types) as frozen after every full collection.
#: Whoever freezes objects freezes the interpreter's thousands too.
_IMMORTAL = 1000 if sys.version_info[:2] == (3, 12) else 0


_OURS: list[bool] = []
"""One for each stretch of work whose objects are frozen by :func:`only_new_objects_collected`."""


def _has_frozen() -> bool:
    """Whether somebody has frozen objects himself; takes as long as counting them."""
    return gc.get_freeze_count() > _IMMORTAL


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
