"""Libraries of kernels, let go where that disturbs nobody: in the thread that builds.

Unloading a module makes the device that it was loaded on the current one of the thread (TVM's destructor does not put
it back). So the last reference to a library is never a user's: it is held here until none of its kernels is in use, and
dropped before the next one is built.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable

from bridge.base.locks import free_in_children
from bridge.compile.backend import Built
from bridge.compile.runtime.background import Build

__all__ = ["hold", "let_go"]

_HELD: dict[Build, weakref.WeakSet[Built]] = {}
_LOCK = free_in_children(threading.Lock())


def hold(kernels: Iterable[Built]) -> None:
    """Keeps the libraries that kernels are in for as long as those are in use, and until :func:`let_go`."""
    with _LOCK:
        for kernel in kernels:
            if kernel.build is not None:
                _HELD.setdefault(kernel.build, weakref.WeakSet()).add(kernel)


def let_go() -> None:
    """Drops the libraries of which no kernel is in use; only in a thread whose current device is nobody's concern."""
    with _LOCK:
        unused = [build for build, kernels in _HELD.items() if not kernels]
        for build in unused:
            del _HELD[build]
    del unused  # the last references: not while the lock is held
