"""Other threads: whether there are any that could draw, so that what the process shares may be put back."""

from __future__ import annotations

import sys
import threading
from types import FrameType

__all__ = ["is_alone"]

_SERVANTS = frozenset(["bridge", "execnet", "ipykernel", "torch", "tornado", "tqdm", "zmq"])
"""Packages whose own threads pass messages, compile or watch a progress bar, and never draw; this one's build."""


def is_alone() -> bool:
    """Whether there is no other thread that could draw, now or later."""
    own = threading.get_ident()
    return all(_is_servant(frame) for ident, frame in sys._current_frames().items() if ident != own)


def _is_servant(frame: FrameType | None) -> bool:
    """Whether a thread, of which this is the innermost frame, was started to run a function of one of the packages."""
    started = ""
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        started = started if package == "threading" else package
        frame = frame.f_back
    return started in _SERVANTS
