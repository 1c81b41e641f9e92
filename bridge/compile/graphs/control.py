"""Control of recorded graphs: a user's wish, what memory is left -> which programs are recorded, and what for."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Hashable
from typing import Literal, Protocol

from bridge.base.log import channel
from bridge.base.lru import LeastRecentlyUsed
from bridge.compile.graphs.ports import Ports
from bridge.compile.graphs.worth import LaunchCost, Verdicts

__all__ = ["MAX_GRAPH_BYTES", "MAX_RECORDINGS", "MODES", "STREAMS", "Mode", "RecordedGraphs", "Shared"]


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
        self._spare = 0, 0  # recordings, and their bytes, that there is room for whatever was dropped meanwhile

    def enroll(self, member: _Member) -> None:
        """From now on, what the member has is counted here."""
        self._members.add(member)

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
        return sum(member.held_bytes for member in tuple(self._members))

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
        buffered: places of inputs that are copied for each replay, wherever they lie.
    """

    def __init__(
        self,
        varies: bool = False,
        moves: Callable[[], int] = lambda: 0,
        verdicts: Verdicts | None = None,
        buffered: Collection[int] = (),
    ):
        self.varies = varies
        self.verdicts = Verdicts() if verdicts is None else verdicts
        self.cost = LaunchCost()
        self.is_warm = False
        self.lock = threading.Lock()
        self._moves, self._moved, self._buffered = moves, 0, buffered
        self._ports: LeastRecentlyUsed[Hashable, Ports] = LeastRecentlyUsed(STREAMS)

    def ports(self, stream: Hashable, count: int, on_host: Collection[int]) -> Ports:
        """The ports on a stream."""
        return self._ports.get(stream) or self._ports.put(stream, Ports(count, on_host, self._buffered))

    def follow_memory(self) -> None:
        """Addresses that memory for results has left do not count any more."""
        moves = self._moves()
        if moves != self._moved:
            self._moved = moves
            for _, ports in self._ports.items():
                ports.forget()
