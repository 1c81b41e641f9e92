"""Store: ``(kind, key)`` → an artifact in a file of its own, shared by any number of processes.

A file is written under another name and renamed: it is there complete, or not at all. What is read is checked; a file
that is damaged, half-written or of another origin counts as absent. No lock is taken: two processes that write one
artifact write the same content. Trouble with the disk costs a warning, once, and a compilation, never a wrong number.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from bridge.artifact.complain import complain
from bridge.artifact.folder import made_private, why_unsafe
from bridge.artifact.format import DamagedError, read_artifact, write_artifact
from bridge.artifact.prune import prune
from bridge.artifact.settings import CacheSettings, NoFolderError, cache_settings, is_off

__all__ = ["Artifact", "Store", "current_store"]

_LOOK_AGAIN = 16
"""A process that has written this part of the bound looks whether something has to go."""

_COUNTER = itertools.count()


@dataclass(frozen=True)
class Artifact:
    """What :meth:`Store.get` finds: its named parts, and the note that it was written with."""

    note: str
    parts: Mapping[str, bytes]


class Store:
    """Artifacts in a directory.

    Args:
        settings: where they lie and what they may take. Where they are off, nothing is found and nothing is kept.

    Safe for threads and processes; a forked child goes on with it.
    """

    def __init__(self, settings: CacheSettings):
        self.settings = settings
        self._can_write = settings.enabled
        self._written = settings.most_bytes  # so that the first thing written has it looked at

    @property
    def folder(self) -> Path:
        return self.settings.folder

    @cached_property
    def is_usable(self) -> bool:
        """Whether anything may be read or written here; asks the directory once."""
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
        """Where an artifact lies, if there is one."""
        return self.folder / kind / key[:2] / key

    def has(self, kind: str) -> bool:
        """Whether an artifact of this kind was ever kept."""
        return self.is_usable and (self.folder / kind).is_dir()

    def get(self, kind: str, key: str) -> Artifact | None:
        """The artifact, which counts as used now; ``None`` where there is none that is whole."""
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
        with suppress(OSError):  # a directory that is only read: nothing is pruned there either
            os.utime(path)
        return Artifact(header["note"], parts)

    def put(self, kind: str, key: str, parts: Mapping[str, bytes], note: str = "") -> None:
        """Keeps an artifact, if it can be written; the first time that it cannot, a warning says why."""
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
        """All artifacts' files, whole or not."""
        for path in sorted(self.folder.glob("*/??/*")):
            if path.is_file():
                yield path


_STORES: dict[CacheSettings, Store] = {}


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
