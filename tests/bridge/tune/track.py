"""Candidates without a clock or a compiler: seconds of choices from a table, for deterministic searches."""

from __future__ import annotations

from bridge.compile import LIMITS, ORDER, Choices
from bridge.tune import Outcome
from bridge.tune.search import Tunable

TUNABLES = [
    Tunable(LIMITS, "tasks", (16, 32, 128)),
    Tunable(ORDER, "interleaved", ((8, 4, 2, 1), (1,))),
    Tunable(LIMITS, "nodes", (20, 160)),
]


def seconds_of(choices: Choices) -> float:
    """Profitability: 32 tasks, and 160 nodes once there are 32 tasks; eight accumulators cost."""
    limits, order = dict(choices.limits), dict(choices.order)
    seconds = {16: 1.1, 32: 0.9}.get(limits.get("tasks"), 1.0)
    seconds *= 1.05 if order.get("interleaved") == (8, 4, 2, 1) else 1.0
    return seconds * (0.95 if limits.get("nodes") == 160 and limits.get("tasks") == 32 else 1.0)


class TableCandidates:
    """Takes ``cost`` seconds for each trial; keeps its arguments.

    Args:
        drift: factor on a candidate's seconds in :meth:`confirm`.
    """

    def __init__(self, cost: float = 2.0, drift: float = 1.0):
        self.cost, self.drift = cost, drift
        self.asked: list[tuple[Choices, Choices]] = []
        self.prepared: list[int] = []

    def prepare(self, candidates) -> None:
        self.prepared.append(len(candidates))

    def __call__(self, incumbent: Choices, candidate: Choices) -> Outcome:
        self.asked.append((incumbent, candidate))
        if dict(candidate.limits).get("nodes") == 20:
            return Outcome([], "failed: CompilationError", self.cost)
        return Outcome(self._pairs(incumbent, candidate, 1.0), "", self.cost)

    def confirm(self, known, chosen, race):
        return self._pairs(known, chosen, self.drift), ""

    def _pairs(self, one, other, drift):
        noise = (0.999, 1.0, 1.001, 1.0, 0.998, 1.002, 1.0)
        return [(seconds_of(one), drift * each * seconds_of(other)) for each in noise]
