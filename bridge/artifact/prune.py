"""Pruning: a directory of artifacts and a bound → the least recently used removed, and what killed processes left."""

from __future__ import annotations

import time
from pathlib import Path

__all__ = ["prune"]

_KEPT = 0.8
"""Part of the bound that is left, so that not every write has to prune."""

_ABANDONED = 3600
"""Seconds after which a file that is still unfinished belongs to a process that was killed."""


def prune(folder: Path, most_bytes: int) -> tuple[int, int]:
    """Removes artifacts, the least recently used first, until they are well within the bound, if they are beyond it.

    Returns:
        number and bytes of the artifacts that were removed.
    """
    for pattern in ("unfinished/*", "claims/*"):
        for path in folder.glob(pattern):
            if _age(path) > _ABANDONED:
                path.unlink(missing_ok=True)
    found = []
    for path in folder.glob("*/??/*"):
        try:
            told = path.stat()
        except OSError:  # another process was quicker
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
