"""Whether this thread is tracing a module right now: a dispatched module inside must then run as plain PyTorch."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["capturing", "is_capturing", "one_capture_at_a_time"]

_state = threading.local()
#: torch.export sets flags of the whole process and puts stand-ins into the module while it traces.
one_capture_at_a_time = threading.RLock()


def is_capturing() -> bool:
    """Whether the calling thread is inside :func:`capturing`."""
    return getattr(_state, "depth", 0) > 0


@contextmanager
def capturing() -> Iterator[None]:
    """While active, dispatched modules called from this thread run eager, uncounted.

    The default generator is left as it was, even if the traced code seeds it. One thread captures at a time.
    """
    with one_capture_at_a_time:
        yield from _capturing()


def _capturing() -> Iterator[None]:
    _state.depth = getattr(_state, "depth", 0) + 1
    generator = torch.get_rng_state()
    try:
        with warnings.catch_warnings():
            # torch copies its own pytree specs in a way that it deprecated
            warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
            # what forward does to attributes is found and judged by bridge.module_state
            warnings.filterwarnings("ignore", message="The tensor attribute", category=UserWarning)
            yield
    finally:
        _state.depth -= 1
        if not torch.equal(torch.get_rng_state(), generator):
            torch.set_rng_state(generator)
