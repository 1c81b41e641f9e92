"""Other threads: whether there are any that could draw, so that what the process shares may be put back; whose code
it is that one of autograd's runs.
"""

from __future__ import annotations

import sys
import threading
import traceback
import weakref
from types import FrameType

__all__ = ["is_alone", "serves", "stack_of"]

_SERVANTS = frozenset(["bridge", "execnet", "ipykernel", "torch", "tornado", "tqdm", "zmq"])
"""Packages whose own threads pass messages, compile or watch a progress bar, and never draw; this one's build."""

_SERVING: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
"""Threads of this package's pools: what started them, and where they wait, is another package's."""


def serves() -> None:
    """Says that this thread, one of a pool, never draws: the pool's ``initializer``."""
    _SERVING.add(threading.current_thread())


def is_alone() -> bool:
    """Whether there is no other thread that could draw, now or later."""
    known = {threading.get_ident(), *(thread.ident for thread in list(_SERVING) if thread.is_alive())}
    return all(_is_servant(frame) for ident, frame in sys._current_frames().items() if ident not in known)


def stack_of(thread: int) -> traceback.StackSummary:
    """The stack at hand; in another thread than that one, the latter's.

    Autograd runs the backward of tensors on a GPU in threads of its own, on whose stacks there is none of the user's
    frames, while the one that called it waits.

    Args:
        thread: as of ``threading.get_ident``.
    """
    frame = None if thread == threading.get_ident() else sys._current_frames().get(thread)
    return traceback.extract_stack(frame)


def _is_servant(frame: FrameType | None) -> bool:
    """Whether a thread, of which this is the innermost frame, was started to run a function of one of the packages."""
    started = ""
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        started = started if package == "threading" else package
        frame = frame.f_back
    return started in _SERVANTS
