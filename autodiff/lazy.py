"""Cached property without a lock: a method -> an attribute that is computed at its first read.

Up to Python 3.11, ``functools.cached_property`` holds one lock per class while it computes. A child process that is
forked meanwhile waits for the lock for ever: no thread of the child releases it.
"""

from __future__ import annotations

import functools
from typing import Any, TypeVar

Value = TypeVar("Value")


class cached_property(functools.cached_property[Value]):  # noqa: TID251
    """``functools.cached_property`` of Python 3.12 and later: two threads may both compute the value."""

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        held = instance.__dict__
        if self.attrname not in held:
            held[self.attrname] = self.func(instance)
        return held[self.attrname]
