"""Other threads: whether a thread exists that could draw random numbers; the user's stack of an autograd thread.

Fork-safe locks: a forked child finds them free, although the threads that held them do not exist there.

Deferred interrupts: a SIGINT (Ctrl-C, a notebook's stop button) during a compilation → raised at a stage boundary.

Python runs a signal's handler between any two instructions of the main thread, in callbacks from C++ as well.
``KeyboardInterrupt`` raised there is swallowed or renamed inside TVM, leaves a mode of torch's active, or ends the
process (where torch's C++ lets no exception pass). So during a compilation the handler only notes the signal, and
:func:`raise_deferred`, between two stages, calls the user's handler.

Handlers that are no Python functions (``SIG_IGN``, ``SIG_DFL``, C code's) stay, and so do threads other than the main
one, which never run handlers. A wake-up descriptor (``signal.set_wakeup_fd``) is written to at once.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

_SERVANTS = frozenset(["bridge", "execnet", "ipykernel", "torch", "tornado", "tqdm", "zmq"])
"""Packages (this one included) whose threads pass messages, compile or watch a progress bar, and never draw."""

_SERVING: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
"""Threads of this package's pools; their stacks show only another package's functions."""


def serves() -> None:
    """Marks this thread of a pool as one that never draws: the pool's ``initializer``."""
    _SERVING.add(threading.current_thread())


def is_alone() -> bool:
    """Whether no other thread could draw, now or later."""
    known = {threading.get_ident(), *(thread.ident for thread in list(_SERVING) if thread.is_alive())}
    return all(_is_servant(frame) for ident, frame in sys._current_frames().items() if ident not in known)


def stack_of(thread: int) -> traceback.StackSummary:
    """This thread's stack; inside another thread, the stack of ``thread`` (an identifier).

    Autograd runs the backward of a GPU's tensors in its own threads, whose stacks have no user frames; the calling
    thread waits meanwhile.
    """
    return traceback.extract_stack(frame_of(thread))


def frame_of(thread: int) -> FrameType | None:
    """The innermost frame of another thread (an identifier); ``None`` for this one, and for one that has ended."""
    return None if thread == threading.get_ident() else sys._current_frames().get(thread)


def _is_servant(frame: FrameType | None) -> bool:
    """Whether the thread with this innermost frame was started by one of the servant packages."""
    started = ""
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        started = started if package == "threading" else package
        frame = frame.f_back
    return started in _SERVANTS


Lock = TypeVar("Lock", bound="threading.Lock | threading.RLock")

_LOCKS: list[threading.Lock | threading.RLock] = []
_held: list[threading.Lock | threading.RLock] = []
"""The locks held by a forking thread."""


def free_in_children(lock: Lock) -> Lock:
    """Makes a forked child find a lock free: a fork waits for it. For locks that live as long as the process."""
    _LOCKS.append(lock)
    return lock


_RENEWED: weakref.WeakSet[threading.Lock | threading.RLock] = weakref.WeakSet()


def renewed_in_children(lock: Lock) -> Lock:
    """Makes a lock new in a forked child: a fork does not wait. For locks held for long, with atomic data changes."""
    _RENEWED.add(lock)
    return lock


def _renew() -> None:
    for lock in list(_RENEWED):
        lock._at_fork_reinit()


def _acquire_all() -> None:
    """Holds all locks. Waits for a lock only while it holds no other, so that threads may nest them in any order."""
    global _held
    awaited = None
    while True:
        held = []
        try:
            if awaited is not None:
                awaited.acquire()
                held.append(awaited)
            awaited = _acquire_others(held)
        except BaseException:
            _release(held)
            raise
        if awaited is None:
            _held = held
            return
        _release(held)


def _acquire_others(held: list[threading.Lock | threading.RLock]) -> threading.Lock | threading.RLock | None:
    """Acquires all free locks → the first lock that is not free, or ``None``."""
    for lock in list(_LOCKS):
        if lock not in held:
            if not lock.acquire(blocking=False):
                return lock
            held.append(lock)
    return None


def _release_all() -> None:
    global _held
    held, _held = _held, []
    _release(held)


def _release(held: list[threading.Lock | threading.RLock]) -> None:
    for lock in reversed(held):
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_acquire_all, after_in_parent=_release_all, after_in_child=_release_all)
    os.register_at_fork(after_in_child=_renew)


_POLL = 0.1
"""Seconds between two checks for an interrupt while waiting for a lock."""


class _Deferral:
    """A handler of SIGINT that notes the first one and calls the user's handler at once for a second one."""

    def __init__(self, handler: Callable[[int, FrameType | None], Any]):
        self.handler = handler
        self.is_pending = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self.is_pending:
            self.is_pending = True
            return
        self.deliver()
        self.handler(number, frame)

    def deliver(self) -> None:
        """Calls the user's handler if a SIGINT was noted."""
        if self.is_pending:
            self.is_pending = False
            self.handler(signal.SIGINT, sys._getframe(1))


_DEFERRED: list[_Deferral] = []
"""The active handler, if any; a list is cheaper to read than a signal's handler."""


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """While active in the main thread, a SIGINT waits for :func:`raise_deferred` or the end; a second one does not.

    Always restores the previous handler. Nested contexts do nothing.

    Raises:
        KeyboardInterrupt: or another error of the user's handler, at the end, if a SIGINT still waits.
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
    """Runs the user's handler of a deferred SIGINT, at a stage boundary (Python's raises ``KeyboardInterrupt``)."""
    for deferral in _DEFERRED[-1:]:
        if deferral.is_pending and _is_main_thread():
            deferral.deliver()


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextmanager
def held(lock: Any) -> Iterator[None]:
    """``with lock``; a deferred SIGINT interrupts the wait for it."""
    while not lock.acquire(timeout=_POLL):
        raise_deferred()
    try:
        yield
    finally:
        lock.release()
