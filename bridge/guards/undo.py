"""Undo: a module and recorded runs of its forward → restores the earlier Python state, inside and outside of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from bridge.guards.kinds import PLAIN, contents_of
from bridge.guards.recording import Reads
from bridge.guards.watched import ABSENT, Contents, Name, Place
from bridge.state import Snapshot

__all__ = ["Settling", "Undo", "needs_first_call", "recorded_reads", "undo"]

_active = threading.local()


class Undo:
    """The earlier state of a module and of all places that recorded runs read; see :func:`undo`.

    Attributes:
        runs: the reads of these runs.
        is_later: whether the runs record a later call, after a different first one: then nothing repeats their writes.
    """

    is_later = False

    def __init__(self, module: nn.Module | None):
        self._tree = None if module is None else Snapshot(module)
        self.runs: list[Reads] = []

    def restore(self) -> None:
        """Restores the whole state."""
        for each in reversed(self.runs):
            each.restore()
        if self._tree is not None:
            self._tree.restore()

    def take_back(self) -> Settling | None:
        """Restores the places that the runs wrote; returns the writes to repeat, or ``None``."""
        written: dict[tuple, tuple[Any, Any, Any]] = {}
        for reads in self.runs:
            for key, then in reads.earlier.items():
                item = reads.items[key]
                if key not in written and getattr(item, "running", None) is None:
                    written[key] = item, then, item.read()
        found = [each for each in written.values() if not each[0].same(each[2], each[1])]
        found += [] if self._tree is None else _of_tree(self._tree)
        settling = Settling(found)
        settling.undo()
        if not found or self.is_later:
            return None
        settling.reads = [(item, item.read()) for reads in self.runs[:-1] for item in _read_by(reads)]
        return settling


def _read_by(reads: Reads) -> Iterator[Any]:
    """The places that a run has read: outside of modules, and plain attributes of modules."""
    yield from (item for key, item in reads.items.items() if key in reads.first)
    for module, names in [(each(), names) for each, names in reads.modules.values()]:
        held = vars(module)
        for name in held.keys() if "*" in names else held.keys() & names:
            if type(held[name]) in PLAIN:
                yield Name(held, name, Place("attribute", name, reads.place(module).of))


def _of_tree(before: Snapshot) -> Iterator[tuple[Any, Any, Any]]:
    """The writes to the attributes of a module tree, and into containers among them."""
    for own, name, held in before.written():
        item = Name(own, name, Place("attribute", name))
        yield item, held[0] if held else ABSENT, item.read()
    for value, held in before.contents():
        item, reader = Contents(value, Place("", "a container")), contents_of(value)
        if not item.same(now := item.read(), then := reader(held)):
            yield item, then, now


class Settling:
    """Writes of a first call that later calls leave alone (``self.config.seen.add(name)``): repeated by the first hit.

    Args:
        places: the written places, with their values before and after.

    Attributes:
        done: whether they have been repeated.
        reads: places that the first call reads, perhaps it alone, with the values that the writes follow.
    """

    def __init__(self, places: Sequence[tuple[Any, Any, Any]]):
        self._places, self.done, self.reads = places, True, ()

    def is_before(self) -> bool:
        """Whether all places hold their values from before the writes."""
        return all(item.same(item.read(), before) for item, before, _ in self._places)

    def do(self) -> None:
        self.done = True
        for item, _, after in self._places:
            item.write(after)

    def undo(self) -> None:
        self.done = False
        for item, before, _ in self._places:
            item.write(before)


@contextmanager
def undo(module: nn.Module | None = None, always: bool = False) -> Iterator[Undo]:
    """Yields an :class:`Undo` of this thread's recorded runs of forward on ``module``; ``None``: on its twins.

    It restores the state after an error; ``always``: after any end.
    """
    made, outer = Undo(module), getattr(_active, "undos", ())
    _active.undos = (*outer, made)
    try:
        yield made
        if always:
            made.restore()
    except BaseException:
        made.restore()
        raise
    finally:
        _active.undos = outer


def needs_first_call() -> None:
    """Notes in each active :func:`undo` that the recorded call is a later one, which differs from the first."""
    for each in getattr(_active, "undos", ()):
        each.is_later = True


def recorded_reads(reads: Reads) -> Reads:
    """Adds the reads of a run to each active :func:`undo`."""
    for each in getattr(_active, "undos", ()):
        each.runs.append(reads)
    return reads
