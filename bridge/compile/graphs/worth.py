"""Worth of a recorded graph: the first runs of a program → whether the host or the device is what they wait for.

What one size of a program has shown holds for others: for those with no more work, if a graph pays there; for those
with no less, if it does not.
"""

from __future__ import annotations

from bridge.compile.graphs.recorder import Recorder, Timer

__all__ = ["RUNS", "LaunchCost", "Verdicts"]

#: Runs that are timed; the one before them is not: it loads kernels.
RUNS = 3
_SHARE = 0.5
"""Of the device's time that the host's is at least, where a graph pays: a replay takes the host a few microseconds."""


class Verdicts:
    """What is known of one program, for all of its sizes. Threads may share it: a verdict that is lost is found again.

    Work is any number that grows with sizes.
    """

    def __init__(self) -> None:
        self._pays, self._fails = -1.0, float("inf")

    def of(self, work: float) -> bool | None:
        """Whether a graph pays; ``None`` if that has to be measured."""
        if work <= self._pays:
            return True
        return False if work >= self._fails else None

    def learn(self, work: float, pays: bool) -> None:
        """What was measured; where it contradicts what is known, sizes in between are measured again."""
        if pays:
            self._pays = max(self._pays, work)
            self._fails = self._fails if work < self._fails else float("inf")
        else:
            self._fails = min(self._fails, work)
            self._pays = self._pays if work > self._pays else -1.0


class LaunchCost:
    """Times the first runs of a program; nothing waits for the device.

    Where the device waits for launches, its time from the first to the last is the host's; where it has more to do than
    the host, or is behind with other work, it is the program's own.
    """

    def __init__(self, recorder: Recorder):
        self._recorder = recorder
        self._timers: list[Timer] = []
        self._skipped = False

    def timer(self) -> Timer | None:
        """For the run that comes now; ``None`` if it is not timed."""
        if not self._skipped:
            self._skipped = True
            return None
        return None if len(self._timers) == RUNS else self._recorder.timer()

    def stop(self, timer: Timer) -> None:
        """At the end of a run; one that raised, as where memory ran out, is not among those that count."""
        timer.stop()
        self._timers.append(timer)

    def is_launch_bound(self) -> bool | None:
        """Whether launches cost the host about as much as the device has to do; ``None`` as long as it is not known."""
        if len(self._timers) < RUNS:
            return None
        seconds = [timer.seconds() for timer in self._timers]
        known = [each for each in seconds if each is not None]
        if len(known) < RUNS:
            return None
        host, device = map(min, zip(*known, strict=True))
        return host >= _SHARE * device
