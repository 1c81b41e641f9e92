"""Deferred interrupts: a SIGINT (Ctrl-C, a notebook's stop button) while something is compiled → raised at a boundary.

Python runs a signal's handler between any two instructions of the main thread, in callbacks from C++ too.
``KeyboardInterrupt`` raised there is swallowed or renamed inside TVM, leaves a mode of torch's active, or ends the
process (where torch's C++ lets no exception pass). So while compiling, the handler only takes note, and the user's
handler is called where an exception is like any other: :func:`raise_deferred`, between two stages.

Left alone are handlers that are no Python functions (``SIG_IGN``, ``SIG_DFL``, those of C code), and other threads than
the main one, which never run handlers. A wake-up descriptor (``signal.set_wakeup_fd``) is written to at once, as ever.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["held", "interrupts_deferred", "raise_deferred"]

_POLL = 0.1
"""Seconds between two looks for an interrupt while waiting for a lock."""


class _Deferral:
    """A handler of SIGINT that notes the first one and calls the user's handler at once for a second one."""

    def __init__(self, handler: Callable[[int, FrameType | None], Any]):
        self.handler = handler
        self._is_pending = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self._is_pending:
            self._is_pending = True
            return
        self.deliver()
        self.handler(number, frame)

    def deliver(self) -> None:
        """Calls the user's handler for a SIGINT that was noted, if one was."""
        if self._is_pending:
            self._is_pending = False
            self.handler(signal.SIGINT, sys._getframe(1))


_DEFERRED: list[_Deferral] = []
"""The handler that is set, while one is; to ask for it is cheaper than to ask for the handler of a signal."""


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """While active in the main thread, a SIGINT waits for :func:`raise_deferred` or the end; a second one does not.

    The handler that was set before is set again in any case. Inside another such context, nothing is done.

    Raises:
        KeyboardInterrupt: or whatever the user's handler raises, at the end, if a SIGINT still waits.
    """
    before = signal.getsignal(signal.SIGINT)
    if not _is_main_thread() or isinstance(before, _Deferral) or not callable(before):
        yield
        return
    deferral = _Deferral(before)
    signal.signal(signal.SIGINT, deferral)
    _DEFERRED.append(deferral)
    try:
        yield
    finally:
        _DEFERRED.remove(deferral)
        signal.signal(signal.SIGINT, before)
        deferral.deliver()


def raise_deferred() -> None:
    """A boundary: where a SIGINT was deferred, the user's handler runs now (Python's raises ``KeyboardInterrupt``)."""
    if _DEFERRED and _is_main_thread():
        _DEFERRED[-1].deliver()


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextmanager
def held(lock: Any) -> Iterator[None]:
    """``with lock``, which lets go of the wait for it when a SIGINT was deferred."""
    while not lock.acquire(timeout=_POLL):
        raise_deferred()
    try:
        yield
    finally:
        lock.release()
