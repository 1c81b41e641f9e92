"""Statistics of a model that is dispatched in parts: those of its parts, summed, and what stays eager."""

from __future__ import annotations

from collections import Counter

from torch import nn

from bridge.compile import RecordedGraphs
from bridge.dispatch.entry import Entry
from bridge.dispatch.options import dispatcher_of
from bridge.dispatch.parts import DispatchedParts, Eager
from bridge.dispatch.stats import DispatchStats

__all__ = ["PartStats"]


class PartStats(DispatchStats):
    """What became of the calls of the modules inside of one that are dispatched; sums are those of now.

    Args:
        module: the model.
        parts: what is dispatched in it.
    """

    def __init__(self, module: nn.Module, parts: DispatchedParts):
        self._module, self._parts = module, parts

    @property
    def parts(self) -> dict[str, DispatchStats]:
        """The statistics of each dispatched module, by its path; the model's own, if it is one, by ``""``."""
        found = {}
        for path, child in self._module.named_modules():
            dispatcher = dispatcher_of(child)
            if dispatcher is not None and (not path or path in self._parts.paths):
                found[path] = dispatcher.stats
        return found

    @property
    def shares(self) -> dict[str, float]:
        """By its path, the share of an eager forward's time, of the sample, that is spent inside of each part."""
        return dict(self._parts.shares)

    @property
    def coverage(self) -> float:
        """The share of an eager forward's time that is spent inside of parts: 0 to 1."""
        return self._parts.coverage

    @property
    def eager(self) -> tuple[Eager, ...]:
        """The modules whose own code stays eager, and why."""
        return self._parts.eager

    @property
    def hits(self) -> int:
        """Calls of parts that ran in TVM."""
        return sum(each.hits for each in self.parts.values())

    @property
    def misses(self) -> Counter[str]:
        """Calls of parts that ran eager, by path and reason."""
        found: Counter[str] = Counter()
        for path, each in self.parts.items():
            found.update({f"{path}: {reason}": count for reason, count in each.misses.items()})
        return found

    @property
    def eager_backwards(self) -> Counter[str]:
        """As of :class:`DispatchStats`, of all parts."""
        return sum((each.eager_backwards for each in self.parts.values()), Counter())

    @property
    def entries(self) -> list[Entry]:
        """The compiled calls of all parts."""
        return [entry for each in self.parts.values() for entry in each.entries]

    @property
    def graphs(self) -> RecordedGraphs:
        """Of the first part; each has its own (:attr:`parts`)."""
        return next((each.graphs for each in self.parts.values()), RecordedGraphs(False))

    def __repr__(self) -> str:
        parts = self.parts
        head = f"DispatchStats(hits={self.hits}, misses={sum(self.misses.values())}) in {len(parts)} parts"
        lines = [f"{head}, in which an eager forward spends {100 * self.coverage:.0f}% of its time"]
        for path, each in parts.items():
            share = self._parts.shares.get(path, 0.0)
            first, *rest = repr(each).splitlines()
            lines.append(f"  {path or 'the model'} ({100 * share:.0f}%): {first}")
            lines += [f"  {line}" for line in rest]
        return "\n".join([*lines, *(f"  eager: {each}" for each in self.eager)])
