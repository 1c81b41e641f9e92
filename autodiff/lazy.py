"""Cached property: an attribute that is computed when it is read first, without a lock.

Until Python 3.11, the one of ``functools`` holds a lock while it computes, one for all objects of a class. A child that
is forked meanwhile waits for it for ever: it has no thread that would let go of it.
"""

from __future__ import annotations

import functools
from typing import Any, TypeVar

__all__ = ["cached_property"]


Value = TypeVar("Value")


class cached_property(functools.cached_property[Value]):  # noqa: TID251
    """As that of Python 3.12 and later: two threads that read it first at once compute it twice."""

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        held = instance.__dict__
        if self.attrname not in held:
            held[self.attrname] = self.func(instance)
        return held[self.attrname]
