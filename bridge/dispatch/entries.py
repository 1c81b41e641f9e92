"""Entries: the compiled calls of one module, or of one of Dynamo's graphs, and what became of its calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from bridge.dispatch.entry import Entry

__all__ = ["MAX_REASONS", "Entries"]

#: Reasons that are counted, each by itself: sizes that differ at every call give one each.
MAX_REASONS = 1000
_OTHERS = "another reason"


class Entries:
    """The entries, each of which counts its hits, and the calls that none of them served.

    Attributes:
        all: the entries, oldest first. A change makes another list: calls of other threads may be walking through this.
        misses: calls that ran eager, by the reason; beyond the first thousand reasons, under one name.
        refused: the misses that are never compiled, by the reason: why.
        eager_backwards: backwards of calls that entries ran which eager's operators computed, by the reason.
    """

    def __init__(self) -> None:
        self.all: list[Entry] = []
        self.misses: Counter[str] = Counter()
        self.eager_backwards: Counter[str] = Counter()
        self.refused: dict[str, str] = {}
        self._hits_of_gone = 0

    @property
    def hits(self) -> int:
        """Calls that an entry ran, one that is gone by now or one that there is."""
        return self._hits_of_gone + sum(entry.hits for entry in self.all)

    def count_miss(self, reason: str) -> None:
        """A call ran eager."""
        is_counted = reason in self.misses or len(self.misses) < MAX_REASONS
        self.misses[reason if is_counted else _OTHERS] += 1

    def add(self, *entries: Entry) -> None:
        """Appends entries; those that there are stay where they are."""
        for entry in entries:
            if entry.programs.eager_backward is not None:
                entry.programs.eager_backwards = self.eager_backwards
        self.all = [*self.all, *(entry for entry in entries if entry not in self.all)]

    def replace(self, gone: Iterable[Entry], entry: Entry) -> None:
        """An entry in the place of others."""
        self.drop(*gone)
        self.add(entry)

    def drop(self, *entries: Entry) -> None:
        """Takes entries out; their hits stay counted."""
        self._hits_of_gone += sum(entry.hits for entry in self.all if entry in entries)
        self.all = [entry for entry in self.all if entry not in entries]
