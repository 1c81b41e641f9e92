"""Libraries of kernels for GPUs: made, kept as bytes, and let go where that disturbs nobody: in the thread that builds.

Unloading a module makes the device that it was loaded on the current one of the thread (TVM's destructor does not put
it back). So the last reference to a library is never a user's: it is held here until none of its kernels is in use, and
dropped before the next one is built.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass

import tvm
from tvm.runtime import Module
from tvm.tirx import PrimFunc

from bridge.base.locks import free_in_children
from bridge.base.log import channel
from bridge.compile.backend import Built
from bridge.compile.cuda.build import HOST_TARGET, build_library
from bridge.compile.cuda.nvrtc import made_for
from bridge.compile.runtime.build import REFUSALS, Build, library_bytes, loaded

__all__ = ["CudaLibraries", "clear_unused", "hold", "let_go"]

_CUDA_RUN_TIME = "ffi.Module.create.cuda"
"""TVM's function that makes a module of machine code for GPUs; missing where there is no driver."""

_LOG = channel("cache")

_HELD: dict[Hashable, weakref.WeakSet[Built]] = {}
_LOCK = free_in_children(threading.Lock())


@dataclass(frozen=True)
class CudaLibraries:
    """Libraries of functions for an architecture, a :class:`~bridge.compile.runtime.kernel_store.Libraries`.

    A file of one has the code that launches, for the host, and what NVRTC made, as it was.
    """

    arch: str

    @property
    def key(self) -> tuple[str, ...] | None:
        """The architecture, NVRTC and what it is told, and what the host's code is made for."""
        if tvm.get_global_func(_CUDA_RUN_TIME, allow_missing=True) is None:
            return None
        return self.arch, str(HOST_TARGET), *made_for()

    def build(self, functions: Mapping[str, PrimFunc], loops: bool) -> Module:
        let_go()
        return build_library(functions, self.arch)

    def build_bytes(self, functions: Mapping[str, PrimFunc], loops: bool) -> tuple[Module, bytes | None]:
        """The library as another process will load it."""
        library = self.build(functions, loops)
        try:
            content = library_bytes(library)
            return self.load(content), content
        except REFUSALS as error:
            _LOG.info("kernels are not kept: %s", error)
            return library, None

    def load(self, content: bytes) -> Module:
        return loaded(content)


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


def clear_unused() -> None:
    """:func:`let_go`, from any thread, if there is something to drop."""
    with _LOCK:
        is_any = not all(_HELD.values())
    if is_any:
        Build(let_go)
