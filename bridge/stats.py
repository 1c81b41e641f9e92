"""What a dispatched module did so far."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from bridge.entry import Entry

__all__ = ["DispatchStats"]


@dataclass
class DispatchStats:
    """Counts of a dispatched module.

    Attributes:
        hits: calls that ran in TVM.
        misses: calls that ran eager, by the reason, which names what differed.
        entries: the compiled calls.
    """

    hits: int = 0
    misses: Counter[str] = field(default_factory=Counter)
    entries: list[Entry] = field(default_factory=list)

    def __repr__(self) -> str:
        lines = [f"DispatchStats(hits={self.hits}, misses={sum(self.misses.values())})"]
        lines += [f"  {entry!r}" for entry in self.entries]
        lines += [f"  {count} x {reason}" for reason, count in self.misses.most_common()]
        return "\n".join(lines)
