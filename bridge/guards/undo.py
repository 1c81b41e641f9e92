"""Undo: a module before forward runs → its Python state, and what forward read and wrote beyond it, put back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from bridge.guards.recording import Reads
from bridge.state import Snapshot

__all__ = ["Undo", "recorded_reads", "undo"]

_active = threading.local()


class Undo:
    """The state of a module and of all that recorded runs read since; see :func:`undo`.

    Attributes:
        runs: what these runs read.
    """

    def __init__(self, module: nn.Module | None):
        self._tree = None if module is None else Snapshot(module)
        self.runs: list[Reads] = []

    def restore(self) -> None:
        """Puts all of it back."""
        for each in reversed(self.runs):
            each.restore()
        if self._tree is not None:
            self._tree.restore()


@contextmanager
def undo(module: nn.Module | None = None) -> Iterator[Undo]:
    """Gives what undoes the runs of forward that this thread records inside.

    Args:
        module: that they run on; ``None``: they run on twins of it.
    """
    made, outer = Undo(module), getattr(_active, "undos", ())
    _active.undos = (*outer, made)
    try:
        yield made
    finally:
        _active.undos = outer


def recorded_reads(reads: Reads) -> Reads:
    """The reads of a run, which each active :func:`undo` learns of."""
    for each in getattr(_active, "undos", ()):
        each.runs.append(reads)
    return reads
