"""Worth of a recorded graph: the first runs of a program → whether the host or the device is what they wait for.

What one size of a program has shown holds for others: where a graph pays, for those with no more work than would keep
the device busy enough; where it does not, for those with no less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bridge.compile.graphs.recordings import GraphRecorder, Timer

__all__ = ["RUNS", "LaunchCost", "Verdicts"]

#: Runs of a round, which are timed; the first of a size is not: it loads kernels.
RUNS = 3
_MOST_ROUNDS = 6
"""After which what all rounds have shown together decides."""
_MOST_DISTURBED = 4 * RUNS
"""Disturbed runs in a row, after which they count as well: the thread is never left alone."""
_SHARE = 0.5
"""Of the device's time that the host's is at least, where a graph pays: a replay takes the host a few microseconds."""

_COPIED_PER_SECOND = 1e12
"""Bytes, on a large GPU; an H200 copies twice as many."""
_SHARE_OF_COPIES = 0.5
"""Of the host's time for the launches of a run, that the device's for copies is at most, where a graph pays."""


class Verdicts:
    """What is known of one program, for all of its sizes. Threads may share it: a verdict that is lost is found again.

    Work is any number that grows with sizes.

    Attributes:
        host: seconds that a run takes the host without a graph, whatever the size, as measured last.
    """

    def __init__(self) -> None:
        self._pays, self._fails = -1.0, float("inf")
        self.host = float("inf")

    def of(self, work: float) -> bool | None:
        """Whether a graph pays; ``None`` if that has to be measured."""
        if work <= self._pays:
            return True
        return False if work >= self._fails else None

    def copies_pay(self, copied: int) -> bool:
        """Whether a graph still pays if each replay copies so many bytes."""
        return copied / _COPIED_PER_SECOND < _SHARE_OF_COPIES * self.host

    def learn(self, work: float, margin: float) -> None:
        """What was measured; where it contradicts what is known, sizes in between are measured again.

        Args:
            margin: how much longer the device might take, and a graph would still pay; less than 1: it does not.
        """
        if margin >= 1:
            self._pays = max(self._pays, work * margin)
            self._fails = self._fails if work < self._fails else float("inf")
        else:
            self._fails = min(self._fails, work)
            self._pays = self._pays if work > self._pays else -1.0


class LaunchCost:
    """Times runs of a program, of whatever sizes; nothing waits for the device. One thread at a time.

    Where the device waits for launches, its time from the first to the last is the host's; where it has more to do than
    the host, or is behind with other work, it is the program's own.

    Others' work on the same processor or device must not decide what holds for good. Runs in which this thread lost its
    processor do not count; the shortest times of a round are taken; and a verdict is the same in two rounds, one after
    the other. Until then it is open, and rounds go on.
    """

    def __init__(self) -> None:
        self._timed: list[tuple[Timer, float]] = []
        self._rounds: list[_Round] = []
        self._disturbed = 0

    def timer(self, recorder: GraphRecorder) -> Timer | None:
        """For the run that comes now; ``None`` if it is not timed."""
        return None if len(self._timed) == RUNS else recorder.timer()

    def stop(self, timer: Timer, work: float) -> None:
        """At the end of a run; one that raised, as where memory ran out, is not among those that count."""
        timer.stop()
        self._disturbed = self._disturbed + 1 if timer.is_disturbed else 0
        if not self._disturbed or self._disturbed > _MOST_DISTURBED:
            self._timed.append((timer, work))

    def teach(self, verdicts: Verdicts) -> None:
        """What the runs have shown, once it is known: the next ones are timed anew."""
        if len(self._timed) < RUNS:
            return
        seconds = [timer.seconds() for timer, _ in self._timed]
        known = [each for each in seconds if each is not None]
        if len(known) < RUNS:
            return
        host, device = map(min, zip(*known, strict=True))
        works = [work for _, work in self._timed]
        self._timed.clear()
        self._rounds.append(_Round(host, device, min(works), max(works)))
        *_, before, now = (None, *self._rounds)
        if before is not None and before.pays == now.pays:
            self._conclude(verdicts, self._rounds[-2:])
        elif len(self._rounds) == _MOST_ROUNDS:
            self._conclude(verdicts, self._rounds)

    def _conclude(self, verdicts: Verdicts, rounds: Sequence[_Round]) -> None:
        found = _Round(
            min(each.host for each in rounds),
            min(each.device for each in rounds),
            min(each.least for each in rounds),
            max(each.most for each in rounds),
        )
        verdicts.host = found.host
        verdicts.learn(found.least if found.pays else found.most, found.margin)
        self._rounds.clear()


@dataclass(frozen=True)
class _Round:
    """The shortest times of a round's runs, in seconds, and their least and most work."""

    host: float
    device: float
    least: float
    most: float

    @property
    def margin(self) -> float:
        """How much longer the device might take, and a graph would still pay."""
        return self.host / (_SHARE * self.device) if self.device > 0 else float("inf")

    @property
    def pays(self) -> bool:
        """Whether a graph does."""
        return self.margin >= 1
