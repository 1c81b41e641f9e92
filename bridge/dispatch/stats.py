"""Dispatch statistics of a module: hits, misses by reason, entries."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from bridge.dispatch.entry import Entry

__all__ = ["DispatchStats"]


_REASONS = 20
"""That are printed: sizes that differ at every call give one each."""


_HINT = 'add_tvm_dispatch(module, sample) in the state of such a call adds an entry for it; on_miss="compile" by itself'


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
        lines += [f"  {count} x {reason}" for reason, count in self.misses.most_common(_REASONS)]
        if len(self.misses) > _REASONS:
            rest = self.misses.most_common()[_REASONS:]
            lines.append(f"  {sum(count for _, count in rest)} x {len(rest)} other reasons (.misses has all)")
        if self.misses:
            lines.append("  " + _HINT)
        return "\n".join(lines)
