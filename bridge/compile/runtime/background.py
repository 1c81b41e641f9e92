"""Background builds: a function runs in a thread of its own while Python goes on; its result is waited for when needed.

LLVM works without the interpreter's lock, so on two processors its work costs no time of the compiler's own passes. One
build runs at a time: LLVM's options belong to the process; while it waits for another compiler, the next one may begin.
What needs no compiler is done before a build's turn. A fork waits for all of them, a child has none.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from bridge.base.interrupts import raise_deferred

__all__ = ["Build", "in_background", "others_may_build", "settle"]

Result = TypeVar("Result")

_POLL = 0.1
"""Seconds between two looks for an interrupt."""

_ONE_AT_A_TIME = threading.Lock()
_RUNNING: set[threading.Thread] = set()
_THIS_THREAD = threading.local()


class Build(Generic[Result]):
    """One piece of work, begun when this is made.

    Attributes:
        seconds: what it took, 0 before its end.

    Args:
        work: one at a time.
        first: what is done before that, beside other builds.
    """

    def __init__(self, work: Callable[[], Result], first: Callable[[], object] = lambda: None):
        self.seconds = 0.0
        self._first: Callable[[], object] | None = first
        self._work: Callable[[], Result] | None = work
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="bridge-build")
        _RUNNING.add(self._thread)
        try:
            self._thread.start()
        except RuntimeError:  # no more threads to be had, or the interpreter is ending
            self._run()

    def result(self) -> Result:
        """What the work returned; raises what it raised. Lets go of the wait where a SIGINT was deferred."""
        while self._thread.is_alive():
            self._thread.join(_POLL)
            raise_deferred()
        if self._error is not None:
            raise self._error
        return self._result

    @property
    def has_failed(self) -> bool:
        """Whether the work has ended with an exception."""
        return self._error is not None

    def _run(self) -> None:
        try:
            self._first()
            with _ONE_AT_A_TIME:
                _THIS_THREAD.builds = True
                started = time.perf_counter()
                self._result = self._work()
                self.seconds = time.perf_counter() - started
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            self._error = error
        finally:
            self._work = self._first = None
            _THIS_THREAD.builds = False
            _RUNNING.discard(self._thread)


def in_background(work: Callable[[], object]) -> None:
    """Does, beside builds, what is only to be done sooner than somebody needs it, who meets whatever it raises."""
    Build(lambda: None, work)


@contextmanager
def others_may_build() -> Iterator[None]:
    """While a build waits for what is not LLVM's."""
    if not getattr(_THIS_THREAD, "builds", False):  # somebody compiles without one
        yield
        return
    _ONE_AT_A_TIME.release()
    try:
        yield
    finally:
        _ONE_AT_A_TIME.acquire()


def settle() -> None:
    """Waits for all builds that have begun."""
    for thread in list(_RUNNING):
        if thread is not threading.current_thread() and thread.ident is not None:
            thread.join()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=settle)
