"""Control of recorded graphs: the user's mode and the free memory → the programs to record, and their memory.

Profitability of a recorded graph: timed first runs of a program → whether host or device is the bottleneck.

A verdict at one size holds for others: a graph that pays also pays for up to ``margin`` times the work; one that does
not pay does not pay for more work either.
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

#: Timed runs of a round. A size's first run is not timed: it loads kernels.
RUNS = 3
_MOST_ROUNDS = 6
"""After so many rounds, all rounds together decide."""
_MOST_DISTURBED = 4 * RUNS
"""After so many disturbed runs in a row, disturbed runs count as well."""
_SHARE = 0.5
"""A graph pays if the host's time is at least this part of the device's: a replay takes the host a few microseconds."""

_COPIED_PER_SECOND = 1e12
"""Bytes per second on a large GPU; an H200 copies twice as many."""
_SHARE_OF_COPIES = 0.5
"""A graph pays if the device's time for copies is at most this part of the host's time for the launches of a run."""


class Verdicts:
    """Verdicts on one program, for all of its sizes. Threads may share it: a lost verdict is found again.

    Work is any number that grows with sizes.

    Attributes:
        host: seconds of host time of a run without a graph, at the last measured size.
    """

    def __init__(self) -> None:
        self._pays, self._fails = -1.0, float("inf")
        self.host = float("inf")

    def of(self, work: float) -> bool | None:
        """Whether a graph pays; ``None``: must be measured."""
        if work <= self._pays:
            return True
        return False if work >= self._fails else None

    def copies_pay(self, copied: int) -> bool:
        """Whether a graph still pays if each replay copies ``copied`` bytes."""
        return copied / _COPIED_PER_SECOND < _SHARE_OF_COPIES * self.host

    def learn(self, work: float, margin: float) -> None:
        """Notes a measurement; if it contradicts earlier ones, sizes in between are measured again.

        Args:
            margin: the factor by which the device's time may grow while a graph still pays; below 1, it does not pay.
        """
        if margin >= 1:
            self._pays = max(self._pays, work * margin)
            self._fails = self._fails if work < self._fails else float("inf")
        else:
            self._fails = min(self._fails, work)
            self._pays = self._pays if work > self._pays else -1.0


class LaunchCost:
    """Times runs of a program, at any sizes, without waiting for the device. One thread at a time.

    If the device waits for launches, its time from the first to the last launch is the host's, else its own.

    Other work on the processor or device must not decide the verdict. Runs in which this thread lost its processor do
    not count, a round takes its shortest times, and two successive rounds must agree.
    """

    def __init__(self) -> None:
        self._timed: list[tuple[Timer, float]] = []
        self._rounds: list[_Round] = []
        self._disturbed = 0

    def timer(self, recorder: GraphRecorder) -> Timer | None:
        """Starts a timer for the next run; ``None``: that run is not timed."""
        return None if len(self._timed) == RUNS else recorder.timer()

    def stop(self, timer: Timer, work: float) -> None:
        """Ends a timed run. A run that raised never gets here, and does not count."""
        timer.stop()
        self._disturbed = self._disturbed + 1 if timer.is_disturbed else 0
        if not self._disturbed or self._disturbed > _MOST_DISTURBED:
            self._timed.append((timer, work))

    def teach(self, verdicts: Verdicts) -> None:
        """Gives a complete round's conclusion to ``verdicts``, and starts the next round."""
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
    """One round: the shortest times of its runs, in seconds, and their least and most work."""

    host: float
    device: float
    least: float
    most: float

    @property
    def margin(self) -> float:
        """The factor by which the device's time may grow while a graph still pays."""
        return self.host / (_SHARE * self.device) if self.device > 0 else float("inf")

    @property
    def pays(self) -> bool:
        """Whether a graph pays."""
        return self.margin >= 1


Mode = Literal["auto"] | bool

MODES: tuple[Mode, ...] = ("auto", True, False)

#: Recordings of all programs of one module, for all sizes; the program replayed the longest ago loses its recordings.
MAX_RECORDINGS = 1024
#: Estimated bytes of device memory that a module's recordings take.
MAX_GRAPH_BYTES = 1 << 30
#: Different reasons that are counted separately.
_MAX_REASONS = 100
_OTHERS = "another reason"

log = channel("graphs")


class _Member(Protocol):
    """An owner of recordings; ``len()``: their number. Each takes ``recording_bytes`` of device memory."""

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
    """A module's policy for recorded graphs, and statistics of them; threads may share it.

    Attributes:
        mode: ``"auto"``: record programs whose launches take the host about as long as the device, or longer;
            ``True``: record every program that can be; ``False``: none.
        replays: runs of programs that were one launch.
        ungraphed: kernel-by-kernel runs although ``mode`` asks for graphs, by reason.
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
        self._spare = 0, 0  # recordings, and their bytes, that fit without another check of the limits

    def enroll(self, member: _Member) -> None:
        """Counts the member's recordings and memory from now on."""
        self._members.add(member)

    def hold(self, memory: Memory) -> None:
        """Counts the memory that the device holds for results from now on."""
        self._memories.add(memory)

    @property
    def recordings(self) -> int:
        """The number of recordings."""
        return sum(map(len, tuple(self._members)))

    @property
    def graph_bytes(self) -> int:
        """Bytes of device memory of the recordings themselves."""
        return sum(member.graph_bytes for member in tuple(self._members))

    @property
    def held_bytes(self) -> int:
        """Bytes of device memory held for recordings: results' memory and buffers; intermediates are shared."""
        return sum(each.held_bytes for each in (*self._members, *self._memories))

    def make_room(self, recording: _Member) -> None:
        """Makes room for another recording of a member: the least recently used other members lose theirs."""
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
        """Counts a kernel-by-kernel run."""
        is_counted = reason in self.ungraphed or len(self.ungraphed) < _MAX_REASONS
        self.ungraphed[reason if is_counted else _OTHERS] += 1

    def refuse(self, program: str, reason: str) -> None:
        """Notes and logs that a program is not recorded any more."""
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


#: Streams on which a program stays recorded, the most recently used.
STREAMS = 4


class Shared:
    """State that all sizes of one program share. One thread at a time uses it.

    Attributes:
        varies: whether there are several sizes.
        verdicts: whether graphs pay; ``cost``: timings of the first runs.
        is_warm: whether some size has run often enough to be recorded: kernels are loaded.
        pays: whether a graph of the latest size pays and may hold its results; ``None``: too early.
        lock: held while the program runs.

    Args:
        moves: how often results' memory moved, over all sizes, to make room for a larger result.
        copied: places of inputs that each replay copies, whatever their addresses.
        backward_pays: of a forward: whether its backward is worth recording; ``None``: too early.
    """

    def __init__(
        self,
        varies: bool = False,
        moves: Callable[[], int] = lambda: 0,
        verdicts: Verdicts | None = None,
        copied: Collection[int] = (),
        backward_pays: Callable[[], bool | None] = lambda: True,
    ):
        self.varies, self.backward_pays = varies, backward_pays
        self.pays: bool | None = None
        self.verdicts = Verdicts() if verdicts is None else verdicts
        self.cost = LaunchCost()
        self.is_warm = False
        self.lock = threading.Lock()
        self._moves, self._moved, self._copied = moves, 0, copied
        self._graph_inputs: LeastRecentlyUsed[Hashable, GraphInputs] = LeastRecentlyUsed(STREAMS)

    def graph_inputs(self, stream: Hashable, count: int, on_host: Collection[int]) -> GraphInputs:
        """The graph inputs of a stream."""
        return self._graph_inputs.get(stream) or self._graph_inputs.put(
            stream, GraphInputs(count, on_host, self._copied)
        )

    def follow_memory(self) -> None:
        """Forgets all addresses once memory of results has moved."""
        moves = self._moves()
        if moves != self._moved:
            self._moved = moves
            for _, graph_inputs in self._graph_inputs.items():
                graph_inputs.forget()
