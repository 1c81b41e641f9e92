"""Cache folder: a path → a directory that nobody but this user (and root) writes to, or why it is not used.

Artifacts hold machine code, which is run: a directory that others write to would let them run theirs.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

__all__ = ["made_private", "why_unsafe"]


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
