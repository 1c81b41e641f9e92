"""Cache settings: environment variables → the cache's directory, its size limit, whether it is on.

The directory must belong to this user or root, and not be world-writable: artifacts contain machine code, so write
access would let other users run theirs.

BRIDGE_CACHE=0                 neither reads nor writes
BRIDGE_CACHE_DIR=/some/where   default: ``tvm_dispatch`` in the user's cache directory; a relative path is relative to
                               the working directory at the import of this package
BRIDGE_CACHE_SIZE=500M         default: 2G; the least recently used artifacts are removed first
"""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bridge.base.log import channel
from bridge.base.session import SESSION

__all__ = ["CacheSettings", "NoFolderError", "cache_settings", "complain", "is_off", "made_private", "why_unsafe"]

_LOG = channel("cache")

_TOLD: set[str] = SESSION.cache("complaints", set())


def complain(trouble: str, detail: str) -> None:
    """Warns of ``trouble`` the first time, later logs it at debug level."""
    if trouble in _TOLD:
        _LOG.debug("%s: %s", trouble, detail)
        return
    _TOLD.add(trouble)
    _LOG.warning("%s: %s (said once; compiled as without a cache)", trouble, detail)


def why_unsafe(folder: Path) -> str:
    """The reason not to trust an existing directory, or empty."""
    if not hasattr(os, "getuid"):
        return ""
    told = folder.stat()
    if not stat.S_ISDIR(told.st_mode):
        return f"{folder} is no directory"
    if told.st_uid not in (os.getuid(), 0):
        return f"{folder} belongs to another user"
    if told.st_mode & stat.S_IWOTH:
        return f"{folder} is writable for everybody"
    above = folder.resolve().parent.stat()
    if above.st_mode & stat.S_IWOTH and not above.st_mode & stat.S_ISVTX:
        return f"{folder.parent} is writable for everybody"
    return ""


def made_private(folder: Path) -> Path:
    """Creates the directory, for this user alone, if it does not exist. ``OSError`` if that fails."""
    if not folder.is_dir():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


_DEFAULT_BYTES = 2 * 2**30

_SIZE = re.compile(r"(\d+(?:\.\d*)?)\s*([KMGT]?)(?:I?B)?", re.IGNORECASE)

_OFF = ("0", "false", "no", "off")


try:
    _BEGUN_IN = Path.cwd()
except OSError:  # the directory was removed
    _BEGUN_IN = None


class NoFolderError(ValueError):
    """The cache's directory cannot be determined."""


@dataclass(frozen=True)
class CacheSettings:
    """The cache's directory and size limit; ``enabled``: whether artifacts are read and written."""

    enabled: bool
    folder: Path
    most_bytes: int


def cache_settings(environment: Mapping[str, str] = os.environ) -> CacheSettings:
    """The settings of the environment.

    Raises:
        NoFolderError: the user has no home directory, or the path is relative and there is no working directory.
        ValueError: ``BRIDGE_CACHE_SIZE`` is no size.
    """
    return CacheSettings(
        enabled=not is_off(environment),
        folder=_folder(environment),
        most_bytes=_bytes(environment.get("BRIDGE_CACHE_SIZE", "")),
    )


def is_off(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether ``BRIDGE_CACHE`` turns the cache off."""
    return environment.get("BRIDGE_CACHE", "").strip().lower() in _OFF


def _folder(environment: Mapping[str, str]) -> Path:
    named = environment.get("BRIDGE_CACHE_DIR")
    try:
        found = Path(named).expanduser() if named else _user_folder(environment) / "tvm_dispatch"
    except RuntimeError as error:  # from Path.home(): a user id without an entry, as in a container
        raise NoFolderError(f"{error} Set BRIDGE_CACHE_DIR") from None
    if not found.is_absolute() and _BEGUN_IN is None:
        raise NoFolderError(f"BRIDGE_CACHE_DIR: {named!r} is relative to a directory that is gone")
    return found if found.is_absolute() else _BEGUN_IN / found


def _user_folder(environment: Mapping[str, str]) -> Path:
    if sys.platform == "win32":
        return Path(environment.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    given = environment.get("XDG_CACHE_HOME", "")
    return Path(given) if Path(given).is_absolute() else Path.home() / ".cache"


def _bytes(text: str) -> int:
    if not text.strip():
        return _DEFAULT_BYTES
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"BRIDGE_CACHE_SIZE: wanted bytes as in '500M' or '2G', got {text!r}")
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))
