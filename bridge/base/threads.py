"""Other threads: whether they do anything, so that what the process shares may be put back or replaced."""

from __future__ import annotations

import selectors
import sys
import threading
from multiprocessing import connection
from types import FrameType

__all__ = ["is_alone", "others_wait"]

_WAITING = {
    function.__code__
    for function in (threading.Condition.wait, threading.Thread.join, selectors.SelectSelector.select, connection.wait)
} | {
    getattr(owner, name).__code__
    for owner, name in (
        (threading.Thread, "_wait_for_tstate_lock"),
        (getattr(selectors, "PollSelector", None), "select"),
        (getattr(selectors, "EpollSelector", None), "select"),
        (getattr(selectors, "KqueueSelector", None), "select"),
    )
    if hasattr(owner, name)
}
"""What threads that have nothing to do are in, those of progress bars, loggers and queues: none of it draws."""
_SERVANTS = frozenset(["execnet", "ipykernel", "torch", "tornado", "tqdm", "zmq"])
"""Packages whose own threads pass messages, compile or watch a progress bar, and never draw."""


def others_wait() -> bool:
    """Whether no other thread of this process does anything at the moment."""
    return all(frame.f_code in _WAITING or _is_servant(frame) for frame in _others())


def is_alone() -> bool:
    """Whether there is no other thread that could draw, now or later."""
    return all(map(_is_servant, _others()))


def _others() -> list[FrameType]:
    own = threading.get_ident()
    return [frame for ident, frame in sys._current_frames().items() if ident != own]


def _is_servant(frame: FrameType | None) -> bool:
    """Whether a thread, of which this is the innermost frame, was started to run a function of one of the packages."""
    started = ""
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        started = started if package == "threading" else package
        frame = frame.f_back
    return started in _SERVANTS
