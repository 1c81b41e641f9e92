"""Whether this thread is tracing a module right now: a dispatched module inside must then run as plain PyTorch."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["capturing", "is_capturing"]

_state = threading.local()


def is_capturing() -> bool:
    """Whether the calling thread is inside :func:`capturing`."""
    return getattr(_state, "depth", 0) > 0


@contextmanager
def capturing() -> Iterator[None]:
    """While active, dispatched modules called from this thread run eager, uncounted."""
    _state.depth = getattr(_state, "depth", 0) + 1
    try:
        yield
    finally:
        _state.depth -= 1
