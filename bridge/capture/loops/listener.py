"""Listener for loops: who compiles a call is told as soon as it is seen to have loops, long before it is traced."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["loops_found", "loops_tell"]

_thread = threading.local()


@contextmanager
def loops_tell(do: Callable[[], object]) -> Iterator[None]:
    """While active, ``do`` is called in this thread when loops have been found in a recorded call."""
    before = getattr(_thread, "do", None)
    _thread.do = do
    try:
        yield
    finally:
        _thread.do = before


def loops_found() -> None:
    """Calls the innermost listener."""
    do = getattr(_thread, "do", None)
    if do is not None:
        do()
