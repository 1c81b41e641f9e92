"""Race: two ways to run the same step, by turns in one process → pairs of seconds, and whether the second is faster.

Each round times both, the order swapped from round to round, so that a slow moment of the machine meets both. A round
in which one of them took far longer than it usually does is run again. What is decided rests on the pairs alone.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Pairs", "Race", "is_faster", "ratio_of"]

Pairs = list[tuple[float, float]]
"""Seconds of the one and of the other, round by round."""

_SPREAD = 1.4826
"""Standard deviations in a median absolute deviation, of a normal distribution."""

_OF_A_MEDIAN = 1.2533
"""Times the error of a mean that a median's is."""

_DEVIATIONS = 3.0
"""Of the median ratio, that it has to be below 1: one in 700 is that far off by chance."""

_WINS = 0.75
"""Rounds at least in which the faster one was faster."""


def ratio_of(pairs: Pairs) -> float:
    """The median of the rounds' ratios, second to first."""
    return statistics.median(b / a for a, b in pairs)


def is_faster(pairs: Pairs, gain: float) -> bool:
    """Whether the second is faster by more than ``gain`` (a part of the time) and by more than the noise."""
    if len(pairs) < 3:
        return False
    ratios = [b / a for a, b in pairs]
    middle = statistics.median(ratios)
    spread = _SPREAD * statistics.median(abs(each - middle) for each in ratios)
    error = _OF_A_MEDIAN * spread / math.sqrt(len(ratios))
    wins = sum(each < 1 for each in ratios) / len(ratios)
    return middle + max(gain, _DEVIATIONS * error) < 1 and wins >= _WINS


@dataclass(frozen=True)
class Race:
    """How long two steps are raced.

    Attributes:
        fewest: rounds after which the second one is given up if it is not ahead.
        most: rounds of one that is.
        seconds: after which no further round begins, once there were the fewest.
        warm_up: runs of each before the first round.
        outlier: times the median of its own seconds, from which on a round is run again.
        clock: seconds.
    """

    fewest: int = 5
    most: int = 21
    seconds: float = 6.0
    warm_up: int = 2
    outlier: float = 1.5
    clock: Callable[[], float] = time.perf_counter

    def __call__(self, one: Callable[[], None], other: Callable[[], None]) -> Pairs:
        """Pairs of seconds; the steps return when they are over."""
        begun = self.clock()
        for _ in range(self.warm_up):
            one()
            other()
        pairs: Pairs = []
        repeated = 0
        while len(pairs) < self.most:
            if len(pairs) >= self.fewest and (self.clock() - begun > self.seconds or ratio_of(pairs) >= 1):
                break
            pairs.append(self._round(one, other, len(pairs) % 2 == 1))
            if len(pairs) >= self.fewest and repeated < self.most:
                kept = self._without_outliers(pairs)
                repeated += len(pairs) - len(kept)
                pairs = kept
        return pairs

    def _round(self, one: Callable[[], None], other: Callable[[], None], swapped: bool) -> tuple[float, float]:
        if swapped:
            second = self._timed(other)
            return self._timed(one), second
        return self._timed(one), self._timed(other)

    def _timed(self, step: Callable[[], None]) -> float:
        begun = self.clock()
        step()
        return max(self.clock() - begun, 1e-9)

    def _without_outliers(self, pairs: Pairs) -> Pairs:
        limits: Sequence[float] = [self.outlier * statistics.median(times) for times in zip(*pairs, strict=True)]
        return [pair for pair in pairs if all(each <= most for each, most in zip(pair, limits, strict=True))]
