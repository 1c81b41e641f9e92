"""Branches: a run that is captured, on two streams: the critical path's steps on one, those beside it on another.

Both streams launch in the program's order. A step waits for the last step of the other stream that works on the same
memory, if one of the two writes it. Memory is told by the addresses of the tensors that a step is given: so views,
places of the arena that serve one value after another and tensors of the caller's that overlap are all seen. In the
graph, that is a branch which leaves and joins the path where it has to, and nowhere else.

What torch's kernels allocate while they run comes from memory of their own stream, which no other stream's step is
given before both are joined.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from bridge.base.tensor_properties import span_of
from bridge.compile.runtime.loop_frame import Instruction

__all__ = ["Branches", "Crossings", "Range", "memory_of"]

Range = tuple[int, int]
"""Addresses from the first to behind the last."""

_PATH, _BESIDE = 0, 1
_ALL: Range = (0, 1 << 64)


def memory_of(tensors: Sequence[torch.Tensor | None]) -> list[Range]:
    """Where tensors lie, each from its first element to its last."""
    found = []
    for tensor in tensors:
        if tensor is not None and (count := tensor.numel()):
            first = tensor.data_ptr()
            span = count if tensor.is_contiguous() else span_of(tensor.shape, tensor.stride())
            found.append((first, first + span * tensor.itemsize))
    return found


class Crossings:
    """What the steps of two streams have worked on, in order → for which of the other's a step has to wait."""

    def __init__(self) -> None:
        self._memory = _Touched(), _Touched()
        self._launched = [0, 0]
        self._awaited = [0, 0]

    def before(self, stream: int, reads: Sequence[Range], writes: Sequence[Range]) -> int | None:
        """The number of the other stream's last step that a step has to wait for; ``None`` if there is none, or the
        stream has waited for it."""
        other = self._memory[1 - stream]
        last = max([*(other.written(each) for each in reads), *(other.touched(each) for each in writes)], default=-1)
        if last < self._awaited[stream]:
            return None
        self._awaited[stream] = last + 1
        return last

    def add(self, stream: int, reads: Sequence[Range], writes: Sequence[Range]) -> None:
        """A step was launched."""
        number = self._launched[stream]
        self._launched[stream] += 1
        for each in reads:
            self._memory[stream].mark(each, number, False)
        for each in writes:
            self._memory[stream].mark(each, number, True)


class _Touched:
    """Addresses → numbers of the last steps that wrote there, and that worked there; -1: none.

    Memory is cut where a range has begun or ended.
    """

    def __init__(self) -> None:
        self._cuts = [0]
        self._written, self._touched = [-1], [-1]

    def written(self, memory: Range) -> int:
        """The last step that wrote into some of it."""
        return max(self._written[self._parts(memory)])

    def touched(self, memory: Range) -> int:
        """The last step that read or wrote some of it."""
        return max(self._touched[self._parts(memory)])

    def mark(self, memory: Range, number: int, is_written: bool) -> None:
        """A step has worked on all of it; none has a smaller number than one before it."""
        first, last = map(self._cut, memory)
        self._touched[first:last] = [number] * (last - first)
        if is_written:
            self._written[first:last] = [number] * (last - first)

    def _parts(self, memory: Range) -> slice:
        begin, end = memory
        return slice(bisect_right(self._cuts, begin) - 1, bisect_left(self._cuts, end))

    def _cut(self, address: int) -> int:
        place = bisect_left(self._cuts, address)
        if place == len(self._cuts) or self._cuts[place] != address:
            self._cuts.insert(place, address)
            for numbers in (self._written, self._touched):
                numbers.insert(place, numbers[place - 1])
        return place


class Branches:
    """Launches the steps of captured runs, one run at a time, from :meth:`fork` to :meth:`join`.

    Args:
        steps: indices of those that go on the second stream.
        beside: a context in which this thread launches on the second stream.
        mark: marks a stream's end so far, by its number: 0 is the critical path's, 1 the other one.
        wait: makes a stream wait for a mark.
    """

    def __init__(
        self,
        steps: Collection[int],
        beside: Callable[[], AbstractContextManager],
        mark: Callable[[int], object],
        wait: Callable[[int, object], None],
    ):
        self._steps, self._beside, self._mark, self._wait = steps, beside, mark, wait
        self._begin()

    def _begin(self) -> None:
        self._crossings = Crossings()
        self._marks: tuple[list, list] = ([], [])
        self._held: list[torch.Tensor] = []

    def fork(self) -> None:
        """Steps beside begin behind all that the path's stream has launched so far, copies of inputs among it."""
        self._begin()
        self._crossings.add(_PATH, [], [_ALL])
        self._marks[_PATH].append(self._mark(_PATH))

    def join(self) -> None:
        """The path waits for all steps beside."""
        if self._marks[_BESIDE]:
            self._wait(_PATH, self._marks[_BESIDE][-1])
        self._begin()

    def begin(self, written: Sequence[torch.Tensor], action: Callable[[], None]) -> None:
        """Runs beside, at once, what writes into tensors: nothing waits for it but who works on these."""
        writes = memory_of(written)
        self._run(_BESIDE, [], writes, action)
        self._crossings.add(_BESIDE, [], writes)

    def launch(self, index: int, step: Instruction, action: Callable[[list], None], registers: list) -> None:
        """Runs a step's action on its stream, once what it waits for is done."""
        is_beside = index in self._steps
        stream = _BESIDE if is_beside else _PATH
        reads = memory_of([registers[slot] for slot in step.reads])
        given = memory_of([registers[slot] for slot in step.writes])  # what a library call returns is nobody's yet
        self._run(stream, reads, given, partial(action, registers))
        self._crossings.add(stream, reads, memory_of([registers[slot] for slot in step.writes]))
        if is_beside:  # until both are joined: their memory would serve the path's next calls
            self._held += [registers[slot] for slot in (*step.reads, *step.writes)]

    def _run(self, stream: int, reads: Sequence[Range], writes: Sequence[Range], action: Callable[[], None]) -> None:
        awaited = self._crossings.before(stream, reads, writes)
        with self._beside() if stream == _BESIDE else nullcontext():
            if awaited is not None:
                self._wait(stream, self._marks[1 - stream][awaited])
            action()
            self._marks[stream].append(self._mark(stream))
