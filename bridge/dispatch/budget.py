"""Compile budget: the cause of a miss (the guard field that differs) → whether another compilation for it may pay.

Compiling takes as long as thousands of calls. It pays if calls like the one it was made for come back; a size or a
number that is another one at every call never does. So compilations are counted by their cause: what came to nothing
(an entry that served no call but its own, a call that turned out to be unsupported) has a small bound, all of them
together a larger one. Beyond it, calls that differ in this field run eager; other causes have bounds of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from bridge.dispatch.entry import Entry

__all__ = ["MAX_COMPILED", "MAX_WASTED", "CompileBudget"]

#: Compilations for one cause that may come to nothing: as many as there is room for entries.
MAX_WASTED = 8
#: Compilations for one cause in all: sizes that come back but are too many to be kept. Loops count when they leave.
MAX_COMPILED = 32


class CompileBudget:
    """What was compiled for calls that missed, by cause.

    Example:
        >>> budget = CompileBudget()
        >>> for _ in range(MAX_WASTED):
        ...     budget.note_wasted("shape of args[0]")
        >>> budget.allows("shape of args[0]", []), budget.allows("grad mode", [])
        (False, True)
    """

    def __init__(self) -> None:
        self._compiled: Counter[str] = Counter()
        self._wasted: Counter[str] = Counter()

    def allows(self, cause: str, entries: Sequence[Entry]) -> bool:
        """Whether one more entry may be compiled for this cause; ``entries``: those that there are."""
        if self._compiled[cause] >= MAX_COMPILED:
            return False
        unused = sum(entry.cause == cause and _is_unused(entry) for entry in entries)
        return self._wasted[cause] + unused < MAX_WASTED

    def note_compiled(self, cause: str, entry: Entry) -> None:
        """An entry was compiled for a call that missed."""
        entry.cause = cause
        self._compiled[cause] += not entry.has_loops

    def note_wasted(self, cause: str) -> None:
        """A call could not be compiled after all."""
        self._wasted[cause] += 1

    def note_left(self, entry: Entry) -> None:
        """An entry is dropped for a newer one."""
        if entry.cause is not None:
            self._wasted[entry.cause] += _is_unused(entry)
            self._compiled[entry.cause] += entry.has_loops

    def clear(self) -> None:
        """Every cause may be compiled for again."""
        self._compiled.clear()
        self._wasted.clear()


def _is_unused(entry: Entry) -> bool:
    return entry.hits <= 1  # the call that it was compiled for
