"""Building: PrimFuncs → machine code; one compiler call for all functions that the process has not built yet.

Weak cache: source → the product of an equal source that is still in use. Equality of functions is structural, so a
cache is a hash table with a few candidates per hash. It holds products weakly: a program's machine code and arena go
away with the last module that uses it.

Background builds: a function runs in a thread of its own; the result is awaited when needed. LLVM works without the
interpreter's lock, so on two processors it costs the compiler's Python passes no time. One build runs at a time,
because LLVM's options belong to the process; while it waits for another compiler, the next one may begin. Work without
a compiler is done before a build's turn. A fork waits for all builds; a child has none.

Library files: a module whose host code LLVM made ↔ the bytes of a shared library, with the modules that it imports. The
imported modules, a GPU's machine code, are data in the library, at the place where TVM's loader expects them.
"""

from __future__ import annotations

import os
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

import tvm
from tvm.runtime import Module
from tvm.tirx import PrimFunc
from tvm_ffi import structural_equal, structural_hash

from bridge.base.log import Stopwatch
from bridge.base.session import SESSION
from bridge.base.threads import free_in_children, raise_deferred
from bridge.compile.backend import Built
from bridge.compile.codegen.tir import SHARED_ATTR
from bridge.compile.runtime.elf import CannotLinkError, shared_library
from bridge.compile.runtime.kernel_store import KernelTexts, Libraries, stored_or_built

__all__ = ["REFUSALS", "Build", "LateMapping", "WeakCache", "build_kernels", "in_background"]
__all__ += ["library_bytes", "loaded", "others_may_build", "settle", "some_of"]

Value = TypeVar("Value")


class LateMapping(Mapping[str, Value]):
    """A mapping whose values are made on first access; ``read``: name → maker of the value."""

    def __init__(self, read: Mapping[str, Callable[[], Value]]):
        self._read = read
        self._found: dict[str, Value] = {}

    def __getitem__(self, name: str) -> Value:
        if name not in self._found:
            self._found[name] = self._read[name]()
        return self._found[name]

    def __contains__(self, name: object) -> bool:
        return name in self._read

    def __iter__(self) -> Iterator[str]:
        return iter(self._read)

    def __len__(self) -> int:
        return len(self._read)


def some_of(values: Mapping[str, Value], names: Collection[str]) -> Mapping[str, Value]:
    """The part of a mapping with keys in ``names``, in its order; makes no values."""
    if isinstance(values, LateMapping):
        return LateMapping({name: lambda name=name: values[name] for name in values if name in names})
    return {name: value for name, value in values.items() if name in names}


Source = TypeVar("Source")
Made = TypeVar("Made")


class WeakCache(Generic[Source, Made]):
    """Source → weakly held product, found by a key and equality of sources.

    Args:
        equal: whether two sources of one key are the same.
        usable: whether a product may still be handed out.

    Not synchronized: callers hold a lock around each call.
    """

    def __init__(self, equal: Callable[[Source, Source], bool], usable: Callable[[Made], bool] = lambda made: True):
        self._equal = equal
        self._usable = usable
        self._entries: dict[Hashable, list[tuple[Source, weakref.ref[Made]]]] = {}
        self._gone: deque[Hashable] = deque()  # the garbage collector fills it; callers empty it

    def get(self, key: Hashable, source: Source) -> Made | None:
        """The product of an equal source, if it is in use, or ``None``."""
        for known, reference in self._entries.get(key, ()):
            made = reference()
            if made is not None and self._usable(made) and self._equal(source, known):
                return made
        return None

    def put(self, key: Hashable, source: Source, made: Made) -> None:
        """Remembers the product of a source while it is in use."""
        self._drop_gone()
        gone = self._gone
        reference = weakref.ref(made, lambda _: gone.append(key))
        self._entries.setdefault(key, []).append((source, reference))

    def clear(self) -> None:
        """Forgets everything; products in use live on."""
        self._entries.clear()

    def __len__(self) -> int:
        """The number of products in use."""
        self._drop_gone()
        return sum(map(len, self._entries.values()))

    def _drop_gone(self) -> None:
        while self._gone:
            key = self._gone.popleft()
            alive = [entry for entry in self._entries.pop(key, ()) if entry[1]() is not None]
            if alive:
                self._entries[key] = alive


Result = TypeVar("Result")

_POLL = 0.1
"""Seconds between two checks for an interrupt."""

_ONE_AT_A_TIME = threading.Lock()
_RUNNING: set[threading.Thread] = set()
_THIS_THREAD = threading.local()


class Build(Generic[Result]):
    """One piece of work in the background, started by the constructor.

    Attributes:
        seconds: duration of the work, 0 before its end.

    Args:
        work: runs exclusively, one build at a time.
        first: runs before ``work``, in parallel with other builds.
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
        except RuntimeError:  # no thread available, or the interpreter is ending
            self._run()

    def result(self) -> Result:
        """The work's return value; raises its exception. A deferred SIGINT interrupts the wait."""
        while self._thread.is_alive():
            self._thread.join(_POLL)
            raise_deferred()
        if self._error is not None:
            raise self._error
        return self._result

    @property
    def has_failed(self) -> bool:
        """Whether the work raised an exception."""
        return self._error is not None

    def _run(self) -> None:
        try:
            self._first()
            with _ONE_AT_A_TIME:
                _THIS_THREAD.builds = True
                watch = Stopwatch()
                self._result = self._work()
                self.seconds = watch.seconds
        except BaseException as error:  # noqa: BLE001 - raised by result()
            self._error = error
        finally:
            self._work = self._first = None
            _THIS_THREAD.builds = False
            _RUNNING.discard(self._thread)


def in_background(work: Callable[[], object]) -> None:
    """Starts optional early work, in parallel with builds; a later use repeats it, and meets its exception."""
    Build(lambda: None, work)


@contextmanager
def others_may_build() -> Iterator[None]:
    """Lets other builds run while this one waits for a compiler other than LLVM."""
    if not getattr(_THIS_THREAD, "builds", False):  # this thread compiles outside of a build
        yield
        return
    _ONE_AT_A_TIME.release()
    try:
        yield
    finally:
        _ONE_AT_A_TIME.acquire()


def settle() -> None:
    """Waits for all builds that have started."""
    for thread in list(_RUNNING):
        if thread is not threading.current_thread() and thread.ident is not None:
            thread.join()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=settle)


try:
    import resource
except ImportError:  # Windows, which has no in-memory files either
    resource = None

REFUSALS = (CannotLinkError, OSError, RuntimeError)
"""Exceptions for a module that cannot be a file here, or a file that cannot be loaded."""


def library_bytes(module: Module) -> bytes:
    """The linked machine code of a module of kind ``"llvm"``, with its imports. Raises one of :data:`REFUSALS`."""
    code = _object_code(module)
    if not module.imports:
        return shared_library(code)
    packed = tvm.get_global_func("runtime.ModulePackImportsToTensor")(module)
    return shared_library(code, {tvm.get_global_func("runtime.ModuleImportsBlobName")(): packed.numpy().tobytes()})


def loaded(content: bytes) -> Module:
    """The module of :func:`library_bytes`, with the same machine code. Raises one of :data:`REFUSALS`."""
    # a file of its own for each: the loader identifies libraries by path; it is not needed after loading
    with tempfile.TemporaryDirectory(prefix="bridge") as folder:
        path = Path(folder) / "kernels.so"
        path.write_bytes(content)
        return tvm.get_global_func("ffi.Module.load_from_file.so")(str(path), "so")


def _object_code(library: Module) -> bytes:
    """LLVM's object file, written in memory: on a full disk, LLVM ends the process.

    Raises:
        OSError: no in-memory files here, or no large ones allowed.
    """
    if not hasattr(os, "memfd_create") or resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY:
        raise OSError("no file in memory can be made here")
    with os.fdopen(os.memfd_create("kernels.o"), "rb") as file:
        library.write_to_file(f"/proc/self/fd/{file.fileno()}", "o")
        return file.read()


_KERNELS: WeakCache[PrimFunc, Built] = SESSION.cache(
    "programs", WeakCache(structural_equal, lambda built: not built.build.has_failed)
)
_LOCK = free_in_children(threading.Lock())

_SHARED: list[Built] = SESSION.cache("programs", [])


def build_kernels(funcs: Sequence[tuple[str, PrimFunc]], key: str, libraries: Libraries) -> list[Built]:
    """Machine code for named PrimFuncs, built in the background; equal functions share it while it is in use.

    One library for all; one of its own for each that serves every shape.

    Args:
        funcs: names and functions.
        key: of the backend; functions of different backends share nothing.
        libraries: makes a library of functions.
    """
    keys = [(key, structural_hash(func)) for _, func in funcs]
    with _LOCK:
        held: list[Built | None] = []
        missing: dict[str, tuple[tuple[str, int], PrimFunc]] = {}
        for (name, func), own in zip(funcs, keys, strict=True):
            held.append(_KERNELS.get(own, func))
            pending = any(k == own and structural_equal(func, f) for k, f in missing.values())
            if held[-1] is None and not pending:
                missing[name] = (own, func)
        wanted: dict[str, dict[str, tuple[tuple[str, int], PrimFunc]]] = {}
        for name, (own, func) in missing.items():
            wanted.setdefault(name if func.attrs.get(SHARED_ATTR, False) else "", {})[name] = (own, func)
        for alone, chosen in wanted.items():
            raise_deferred()
            functions = {name: func for name, (_, func) in chosen.items()}
            kernels = KernelTexts(functions)
            made = Build(partial(stored_or_built, kernels, key, libraries), kernels.read)
            for name, (own, func) in chosen.items():
                built = Built(
                    lambda name=name, made=made: made.result()[name],
                    made,
                    lambda name=name, made=made: getattr(made.result(), "keys_on_disk", {}).get(name),
                )
                held.append(built)  # keeps it alive until the lookup below
                if alone:
                    _SHARED.append(built)
                _KERNELS.put(own, func, built)
        return [_KERNELS.get(own, func) for (_, func), own in zip(funcs, keys, strict=True)]
