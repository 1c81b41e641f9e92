"""Cache settings: environment variables → where artifacts lie, how many bytes they may take, whether there are any.

Cache folder: a path → a directory that nobody but this user (and root) writes to, or why it is not used.
Artifacts hold machine code, which is run: a directory that others write to would let them run theirs.

BRIDGE_CACHE=0                 neither reads nor writes
BRIDGE_CACHE_DIR=/some/where   default: ``tvm_dispatch`` in the user's cache directory; a relative one is taken from
                               where the process was when this package was imported
BRIDGE_CACHE_SIZE=500M         default: 2G; the least recently used artifacts go first
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
    """Warns of ``trouble`` the first time, tells the log's details later."""
    if trouble in _TOLD:
        _LOG.debug("%s: %s", trouble, detail)
        return
    _TOLD.add(trouble)
    _LOG.warning("%s: %s (said once; compiled as without a cache)", trouble, detail)


def why_unsafe(folder: Path) -> str:
    """Why artifacts in an existing directory are not to be trusted; empty where they are."""
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
    """Makes the directory, for this user alone, where there is none. ``OSError`` where that is impossible."""
    if not folder.is_dir():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


_DEFAULT_BYTES = 2 * 2**30

_SIZE = re.compile(r"(\d+(?:\.\d*)?)\s*([KMGT]?)(?:I?B)?", re.IGNORECASE)

_OFF = ("0", "false", "no", "off")


try:
    _BEGUN_IN = Path.cwd()
except OSError:  # removed meanwhile
    _BEGUN_IN = None


class NoFolderError(ValueError):
    """There is no telling where artifacts lie."""


@dataclass(frozen=True)
class CacheSettings:
    """Where artifacts lie and how many bytes all of them may take; ``enabled``: whether they are read and written."""

    enabled: bool
    folder: Path
    most_bytes: int


def cache_settings(environment: Mapping[str, str] = os.environ) -> CacheSettings:
    """The settings as the environment has them now.

    Raises:
        NoFolderError: a user without a home directory, or a relative path where there is no current directory.
        ValueError: a size that is none.
    """
    return CacheSettings(
        enabled=not is_off(environment),
        folder=_folder(environment),
        most_bytes=_bytes(environment.get("BRIDGE_CACHE_SIZE", "")),
    )


def is_off(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the user wants no cache."""
    return environment.get("BRIDGE_CACHE", "").strip().lower() in _OFF


def _folder(environment: Mapping[str, str]) -> Path:
    named = environment.get("BRIDGE_CACHE_DIR")
    try:
        found = Path(named).expanduser() if named else _user_folder(environment) / "tvm_dispatch"
    except RuntimeError as error:  # of Path.home(): a number without an entry among the users, as in a container
        raise NoFolderError(f"{error} Set BRIDGE_CACHE_DIR") from None
    if not found.is_absolute() and _BEGUN_IN is None:
        raise NoFolderError(f"BRIDGE_CACHE_DIR: {named!r} is relative to a directory that is gone")
    return found if found.is_absolute() else _BEGUN_IN / found


def _user_folder(environment: Mapping[str, str]) -> Path:
    """The user's cache directory on this platform."""
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
