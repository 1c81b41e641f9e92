"""Control of recorded graphs: a user's wish, what memory is left -> which programs are recorded, and what for.

Profitability of a recorded graph: the first runs of a program → whether the host or the device is what they wait for.

What one size of a program has shown holds for others: where a graph pays, for those with no more work than would keep
the device busy enough; where it does not, for those with no less.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from bridge.base.log import channel
from bridge.base.lru import LeastRecentlyUsed
from bridge.compile.graphs.recordings import GraphInputs, GraphRecorder, Memory, Timer

__all__ = ["MAX_GRAPH_BYTES", "MAX_RECORDINGS", "MODES", "RUNS", "STREAMS", "LaunchCost", "Mode", "RecordedGraphs"]
__all__ += ["Shared", "Verdicts"]

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


Mode = Literal["auto"] | bool

MODES: tuple[Mode, ...] = ("auto", True, False)

#: Recordings of all programs of one module, for all sizes; the program that was replayed the longest ago loses its own.
MAX_RECORDINGS = 1024
#: Bytes of the device's that these take, by a rule of thumb.
MAX_GRAPH_BYTES = 1 << 30
#: Reasons that are counted, each by itself.
_MAX_REASONS = 100
_OTHERS = "another reason"

log = channel("graphs")


class _Member(Protocol):
    """Somebody who has recordings; ``len()``: how many. Of the device's bytes, one takes ``recording_bytes``."""

    last_used: int

    @property
    def recording_bytes(self) -> int: ...
    @property
    def graph_bytes(self) -> int: ...
    @property
    def held_bytes(self) -> int: ...
    def drop(self) -> None: ...
    def __len__(self) -> int: ...


class RecordedGraphs:
    """What a user decides about the recorded graphs of a module, and what can be seen of them; threads may share it.

    Attributes:
        mode: ``"auto"``: programs are recorded whose launches take the host about as long as the device, or longer;
            ``True``: all that can be; ``False``: none.
        replays: runs of programs that were one launch.
        ungraphed: runs that launched every kernel by itself although ``mode`` asks for graphs, by the reason.
        refused: programs that are not recorded any more, with the reason.
        clock: counts uses.
    """

    def __init__(self, mode: Mode = "auto"):
        self.mode = mode
        self.replays = 0
        self.ungraphed: Counter[str] = Counter()
        self.refused: dict[str, str] = {}
        self.clock = itertools.count(1)
        self._members: weakref.WeakSet[_Member] = weakref.WeakSet()
        self._memories: weakref.WeakSet[Memory] = weakref.WeakSet()
        self._spare = 0, 0  # recordings, and their bytes, that there is room for whatever was dropped meanwhile

    def enroll(self, member: _Member) -> None:
        """From now on, what the member has is counted here."""
        self._members.add(member)

    def hold(self, memory: Memory) -> None:
        """From now on, what the device has set aside for results is counted here."""
        self._memories.add(memory)

    @property
    def recordings(self) -> int:
        """How many there are."""
        return sum(map(len, tuple(self._members)))

    @property
    def graph_bytes(self) -> int:
        """Bytes that the recordings themselves take."""
        return sum(member.graph_bytes for member in tuple(self._members))

    @property
    def held_bytes(self) -> int:
        """Bytes of the device that are held for recordings: results' memory and buffers; intermediates are shared."""
        return sum(each.held_bytes for each in (*self._members, *self._memories))

    def make_room(self, recording: _Member) -> None:
        """Before a member makes another recording: the one that was used the longest ago loses its own."""
        wanted, (count, nbytes) = recording.recording_bytes, self._spare
        if count > 0 and nbytes >= wanted:
            self._spare = count - 1, nbytes - wanted
            return
        while self.recordings >= MAX_RECORDINGS or self.graph_bytes > MAX_GRAPH_BYTES:
            others = [member for member in tuple(self._members) if len(member) and member is not recording]
            if not others:
                break
            min(others, key=lambda member: member.last_used).drop()
        self._spare = MAX_RECORDINGS - self.recordings - 1, MAX_GRAPH_BYTES - self.graph_bytes - wanted

    def count(self, reason: str) -> None:
        """A run launched every kernel by itself."""
        is_counted = reason in self.ungraphed or len(self.ungraphed) < _MAX_REASONS
        self.ungraphed[reason if is_counted else _OTHERS] += 1

    def refuse(self, program: str, reason: str) -> None:
        """A program is not recorded any more."""
        self.refused[program] = reason
        log.info("%s runs without a recorded graph: %s", program, reason)

    def __repr__(self) -> str:
        if self.mode is False:
            return "RecordedGraphs(off)"
        head = f"RecordedGraphs({self.mode!r}, {self.replays} replays of {self.recordings} recordings"
        lines = [f"{head}, {self.held_bytes} bytes)"]
        lines += [f"  {count} runs without: {reason}" for reason, count in self.ungraphed.most_common()]
        lines += [f"  {program} is not recorded: {reason}" for program, reason in self.refused.items()]
        return "\n".join(lines)


#: Streams on which a program stays recorded; those used last.
STREAMS = 4


class Shared:
    """Of one program. One thread at a time is in it.

    Attributes:
        varies: whether there are several sizes.
        verdicts: whether graphs pay; ``cost``: what the first runs have taken.
        is_warm: whether some size has run often enough to be recorded: kernels are loaded.
        lock: held by whoever runs it.

    Args:
        moves: how often results' memory had to move, for all sizes, because a larger one came.
        copied: places of inputs that are copied for each replay, wherever they lie.
    """

    def __init__(
        self,
        varies: bool = False,
        moves: Callable[[], int] = lambda: 0,
        verdicts: Verdicts | None = None,
        copied: Collection[int] = (),
    ):
        self.varies = varies
        self.verdicts = Verdicts() if verdicts is None else verdicts
        self.cost = LaunchCost()
        self.is_warm = False
        self.lock = threading.Lock()
        self._moves, self._moved, self._copied = moves, 0, copied
        self._graph_inputs: LeastRecentlyUsed[Hashable, GraphInputs] = LeastRecentlyUsed(STREAMS)

    def graph_inputs(self, stream: Hashable, count: int, on_host: Collection[int]) -> GraphInputs:
        """The graph_inputs on a stream."""
        return self._graph_inputs.get(stream) or self._graph_inputs.put(
            stream, GraphInputs(count, on_host, self._copied)
        )

    def follow_memory(self) -> None:
        """Addresses that memory for results has left do not count any more."""
        moves = self._moves()
        if moves != self._moved:
            self._moved = moves
            for _, graph_inputs in self._graph_inputs.items():
                graph_inputs.forget()
