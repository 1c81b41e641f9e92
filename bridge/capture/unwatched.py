"""Pauses of the watch over random generators (:mod:`bridge.capture.generator_watch`): a profiler of the interpreter."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

__all__ = ["unwatched"]


class unwatched:
    """While torch's or our code works for forward: a listener would be called for each of its thousands of calls."""

    __slots__ = ("_listener",)

    def __init__(self) -> None:
        self._listener = sys.getprofile()

    def __enter__(self) -> unwatched:
        if self._listener is not None:
            sys.setprofile(None)
        return self

    def __exit__(self, *error: object) -> None:
        if self._listener is not None:
            sys.setprofile(self._listener)

    def call(self, func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """What ``func`` returns; it is watched: code of the user's may run in it."""
        sys.setprofile(self._listener)
        try:
            return func(*args, **kwargs)
        finally:
            if self._listener is not None:
                sys.setprofile(None)
