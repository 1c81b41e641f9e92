"""Store: ``(kind, key)`` → an artifact in a file of its own, shared by any number of processes.

A file is written under a temporary name and renamed: it appears complete or not at all. Reads verify the checksum
(:mod:`bridge.artifact.codec`); a damaged or foreign file counts as absent. Two processes that write one artifact write
the same content. Disk errors cost one warning and a compilation, never a wrong result.

:func:`made_once`: if several processes need the same artifact at the same time, one makes it and the others wait. The
maker holds a claim: the system's lock of a file, which ends with its process. No process waits longer than a time limit
before it makes the artifact itself.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import tvm

import autodiff
import partition
from autodiff.lazy import cached_property
from bridge.artifact.codec import DamagedError, key_of, read_artifact, write_artifact
from bridge.artifact.settings import (
    CacheSettings,
    NoFolderError,
    cache_settings,
    complain,
    is_off,
    made_private,
    why_unsafe,
)
from bridge.base.session import SESSION
from bridge.base.threads import raise_deferred

try:
    import fcntl
except ImportError:  # no POSIX
    fcntl = None

__all__ = ["Artifact", "Store", "current_store", "made_once", "of_this_package", "prune", "versions"]

_KEPT = 0.8
"""Share of the limit to which pruning reduces the cache, so that not every write has to prune."""

_ABANDONED = 3600
"""Seconds after which an unfinished file is taken to be a killed process's."""


def prune(folder: Path, most_bytes: int) -> tuple[int, int]:
    """If the cache exceeds the limit, removes the least recently used artifacts; returns their number and bytes."""
    for pattern in ("unfinished/*", "claims/*"):
        for path in folder.glob(pattern):
            if _age(path) > _ABANDONED:
                path.unlink(missing_ok=True)
    found = []
    for path in folder.glob("*/??/*"):
        try:
            told = path.stat()
        except OSError:  # another process removed it
            continue
        found.append((told.st_mtime_ns, told.st_size, path))
    total, removed, freed = sum(size for _, size, _ in found), 0, 0
    if total <= most_bytes:
        return 0, 0
    for _, size, path in sorted(found):
        if total - freed <= _KEPT * most_bytes:
            break
        path.unlink(missing_ok=True)
        removed, freed = removed + 1, freed + size
    return removed, freed


def _age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0


_LOOK_AGAIN = 16
"""A process checks the limit after it has written this fraction of it: 1/16."""

_COUNTER = itertools.count()


@dataclass(frozen=True)
class Artifact:
    """An artifact read by :meth:`Store.get`: its named parts and its note."""

    note: str
    parts: Mapping[str, bytes]


class Store:
    """Artifacts in a directory; safe for threads, processes and forked children.

    Args:
        settings: directory and size limit. If they are off, nothing is found or stored.
    """

    def __init__(self, settings: CacheSettings):
        self.settings = settings
        self._can_write = settings.enabled
        self._written = settings.most_bytes  # so that the first write checks the limit

    @property
    def folder(self) -> Path:
        return self.settings.folder

    @cached_property
    def is_usable(self) -> bool:
        """Whether the directory may be read and written; checked once."""
        if not self.settings.enabled:
            return False
        try:
            problem = why_unsafe(made_private(self.folder))
        except OSError as error:
            problem = str(error)
        if problem:
            complain("the cache is not used", problem)
        return not problem

    def path(self, kind: str, key: str) -> Path:
        """The path of an artifact's file, which may not exist."""
        return self.folder / kind / key[:2] / key

    def has(self, kind: str) -> bool:
        """Whether an artifact of this kind was ever stored."""
        return self.is_usable and (self.folder / kind).is_dir()

    def get(self, kind: str, key: str) -> Artifact | None:
        """The artifact, marked as used now; ``None`` if it is absent or damaged."""
        if not self.is_usable:
            return None
        path = self.path(kind, key)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            complain("the cache cannot be read", str(error))
            return None
        try:
            header, parts = read_artifact(content, kind, key)
        except DamagedError as error:
            complain("a file of the cache is ignored", f"{path} {error}")
            return None
        with suppress(OSError):  # a read-only directory, which is never pruned
            os.utime(path)
        return Artifact(header["note"], parts)

    def put(self, kind: str, key: str, parts: Mapping[str, bytes], note: str = "") -> None:
        """Stores an artifact; on the first error it warns and disables writing."""
        if not (self._can_write and self.is_usable):
            return
        content = write_artifact(kind, key, parts, note)
        if len(content) > self.settings.most_bytes:
            return
        path = self.path(kind, key)
        unfinished = self.folder / "unfinished" / f"{os.getpid()}.{threading.get_ident()}.{next(_COUNTER)}"
        try:
            made_private(unfinished.parent)
            made_private(path.parent)
            try:
                unfinished.write_bytes(content)
                unfinished.replace(path)
            except BaseException:
                unfinished.unlink(missing_ok=True)
                raise
            self._bound(len(content))
        except OSError as error:
            self._can_write = False
            complain("the cache cannot be written", str(error))

    def _bound(self, size: int) -> None:
        self._written += size
        if self._written >= self.settings.most_bytes / _LOOK_AGAIN:
            self._written = 0
            prune(self.folder, self.settings.most_bytes)

    def files(self) -> Iterator[Path]:
        """The files of all artifacts, damaged ones included."""
        for path in sorted(self.folder.glob("*/??/*")):
            if path.is_file():
                yield path


_STORES: dict[CacheSettings, Store] = SESSION.cache("stores", {})


def current_store() -> Store:
    """The store of the environment's settings."""
    try:
        settings = cache_settings()
    except NoFolderError as error:
        settings = CacheSettings(False, Path(os.devnull), 0)
        if not is_off():
            complain("the cache is not used", str(error))
    except ValueError as error:
        complain("a setting of the cache is ignored", str(error))
        settings = cache_settings({**os.environ, "BRIDGE_CACHE_SIZE": ""})
    return _STORES.get(settings) or _STORES.setdefault(settings, Store(settings))


@functools.cache
def versions() -> tuple[tuple[str, str], ...]:
    """``(name, version)`` of torch, TVM and this package, whose version is a digest of its sources."""
    digest = hashlib.sha256()
    for root in (Path(__file__).parents[1], *(Path(package.__file__).parent for package in (autodiff, partition))):
        above = len(str(root.parent))
        for path in _sources(str(root)):
            with open(path, "rb", buffering=0) as file:
                digest.update(path[above:].encode() + b"\0" + file.read() + b"\0")
    return ("torch", str(torch.__version__)), ("tvm", str(tvm.__version__)), ("sources", digest.hexdigest())


def _sources(root: str) -> Iterator[str]:
    """The Python files below a folder, in a fixed order; no ``Path`` objects, since every start reads these files."""
    for folder, inside, files in os.walk(root):
        inside[:] = sorted(each for each in inside if each != "__pycache__")
        yield from (os.path.join(folder, name) for name in sorted(files) if name.endswith(".py"))


def of_this_package(*parts: Any) -> str:
    """:func:`key_of` of the parts and the versions of torch, TVM and this package's sources."""
    return key_of(versions(), *parts)


Made = TypeVar("Made")

_POLL = 0.02
_LONGEST = 120.0
"""Most seconds to wait for another process: a large model's kernels take long on a shared machine."""


def made_once(store: Store, claim: str, get: Callable[[], Made | None], make: Callable[[], Made]) -> Made:
    """The result of ``get``, or else of ``make``, which one process at a time runs, unless others have waited too long.

    Args:
        claim: the artifact's key.
        get: reads the artifact from the store.
        make: makes the artifact and stores it.
    """
    found = get()
    if found is not None or not store.is_usable:
        return make() if found is None else found
    path = store.folder / "claims" / claim
    started = time.monotonic()
    while True:
        with _claimed(path) as is_ours:
            found = get()  # another process may have made it meanwhile
            if found is not None or is_ours or time.monotonic() - started > _LONGEST:
                return make() if found is None else found
        time.sleep(_POLL)
        raise_deferred()


@contextmanager
def _claimed(path: Path) -> Iterator[bool]:
    """Context: yields whether this thread holds the claim inside; true as well if there are no locks of files."""
    with ExitStack() as stack:
        try:
            made_private(path.parent)
            file = stack.enter_context(open(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600), "wb"))
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            stack.callback(path.unlink, missing_ok=True)
        except BlockingIOError:
            yield False
            return
        except OSError as error:
            complain("the cache cannot be written", str(error))
        yield True
