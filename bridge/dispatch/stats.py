"""Dispatch statistics of a module: hits, misses by reason, entries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from bridge.compile import RecordedGraphs
from bridge.dispatch.entries import Entries
from bridge.dispatch.entry import Entry

__all__ = ["DispatchStats"]


_REASONS = 20
"""That are printed: sizes that differ at every call give one each."""


_HINT = 'add_tvm_dispatch(module, sample) in the state of such a call adds an entry for it; on_miss="compile" by itself'


class DispatchStats:
    """What became of a dispatched module's calls: a view, which later calls change."""

    def __init__(
        self, entries: Entries, graphs: RecordedGraphs | None = None, compiles: Callable[[], bool] = lambda: False
    ):
        self._entries, self._compiles = entries, compiles
        self._graphs = graphs or RecordedGraphs(False)

    @property
    def hits(self) -> int:
        """Calls that ran in TVM."""
        return self._entries.hits

    @property
    def misses(self) -> Counter[str]:
        """Calls that ran eager, by the reason, which names what differed."""
        return self._entries.misses

    @property
    def eager_backwards(self) -> Counter[str]:
        """Backwards of hits that eager's operators computed, since they were differentiated again or batched, by the
        reason."""
        return self._entries.eager_backwards

    @property
    def entries(self) -> list[Entry]:
        """The compiled calls."""
        return self._entries.all

    @property
    def graphs(self) -> RecordedGraphs:
        """What became of CUDA graphs: replays, runs without one by the reason, bytes."""
        return self._graphs

    def __repr__(self) -> str:
        lines = [f"DispatchStats(hits={self.hits}, misses={sum(self.misses.values())})"]
        lines += [f"  {entry!r}" for entry in self.entries]
        lines += [f"  {count} x {reason}" for reason, count in self.eager_backwards.items()]
        refused = self._entries.refused
        for reason, count in self.misses.most_common(_REASONS):
            lines.append(f"  {count} x {reason}")
            lines += [f"    {line}" for line in refused.get(reason, "").splitlines()]
        if len(self.misses) > _REASONS:
            rest = self.misses.most_common()[_REASONS:]
            lines.append(f"  {sum(count for _, count in rest)} x {len(rest)} other reasons (.misses has all)")
        if self.graphs.replays or self.graphs.refused:
            lines += [f"  {line}" for line in repr(self.graphs).splitlines()]
        if any(reason not in refused for reason in self.misses) and not self._compiles():
            lines.append("  " + _HINT)
        return "\n".join(lines)
