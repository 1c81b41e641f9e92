"""Control of recorded graphs: whether a module's programs are recorded, and what became of their runs."""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from typing import Literal, Protocol

from bridge.base.log import channel

__all__ = ["MAX_GRAPH_BYTES", "MAX_RECORDINGS", "MODES", "Mode", "RecordedGraphs"]

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
