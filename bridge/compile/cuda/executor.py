"""Executor on a GPU: a program bound to its kernels for one device, on torch's current stream of that device.

Each stream has a pool of arena blocks of its own: work on one stream runs in the order of the calls, so a block that
was given back may be taken while the GPU still works in it; work on another stream may overlap with it. While torch
captures a CUDA graph, blocks come from the graph's pool, and a replay finds them unchanged.

Kernels read vectors of 16 bytes: a misaligned input is copied. Generators' states are copied from host to device.

Second stream: a captured run on two streams: the critical path's steps on one, other steps on the second. Both streams
launch in the program's order. A step waits for the last step of the other stream that uses the same memory, if one of
the two writes it. Memory is identified by the addresses of a step's tensors; this covers views, arena memory that is
reused for several values, and overlapping tensors of the caller. In the graph, that is a branch which leaves and joins
the path only where necessary. Allocations of torch's kernels come from memory of their own stream, which the other
stream's steps get only after both are joined.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from bridge.base.lru import LeastRecentlyUsed
from bridge.base.session import SESSION
from bridge.base.tensor_properties import span_of
from bridge.base.threads import free_in_children
from bridge.base.torch_cuda import current_device, current_stream, empty_strided
from bridge.base.torch_internals import VF
from bridge.compile.cuda.copies import bring
from bridge.compile.runtime.executor import Actions, Executor
from bridge.compile.runtime.instructions import Launch
from bridge.compile.runtime.layout import ArenaPool, PoolUser
from bridge.compile.runtime.loop_frame import Instruction
from bridge.compile.runtime.program import Program

__all__ = ["ALIGNMENT", "POOLS", "Crossings", "CudaExecutor", "Range", "SecondStream", "StreamPools", "memory_of"]

#: Alignment in bytes of a kernel's widest access.
ALIGNMENT = 16

_STREAMS = 8
"""Streams for whose blocks a program keeps its registers, the most recently used."""


class StreamPools:
    """Pools of arena blocks by device and stream."""

    def __init__(self) -> None:
        self._pools: dict[tuple[torch.device, int], ArenaPool] = {}
        self._lock = free_in_children(threading.Lock())

    def of(self, device: torch.device, stream: int) -> ArenaPool:
        """The pool of a stream on a device."""
        with self._lock:
            return self._pools.setdefault((device, stream), ArenaPool(device))

    @property
    def held_bytes(self) -> int:
        """Bytes of all blocks."""
        return sum(pool.held_bytes for pool in tuple(self._pools.values()))

    def clear(self) -> None:
        """Drops the free blocks."""
        for pool in tuple(self._pools.values()):
            pool.clear()


POOLS = SESSION.cache("programs", StreamPools())
"""The process's pools."""


class CudaExecutor(Executor):
    """Runs one program on one device; thread-safe. Its first run binds the instructions.

    Args:
        pool: of the blocks for runs by :class:`Executor`'s ``__call__``; by default the current stream's.
    """

    def __init__(
        self, program: Program, device: torch.device, pool: ArenaPool | None = None, actions: Actions | None = None
    ):
        super().__init__(program, device, prepare=_nothing, empty=empty_strided, pool=pool, actions=actions)
        self._device, self._index = device, device.index
        self._by_stream: LeastRecentlyUsed[int, PoolUser] = LeastRecentlyUsed(_STREAMS)
        read = {slot for step in self.steps if isinstance(step, Launch) for slot in step.reads}
        self._brought = [param.slot for param in self._layout.params if param.lies_on_host and param.slot in read]

    def __call__(
        self, inputs: Sequence[torch.Tensor], *, consume: bool = False, fresh: Sequence[torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """See :meth:`bridge.compile.runtime.executor.Executor.__call__`."""
        if current_device() != self._index:
            with torch.cuda.device(self._index):
                return self(inputs, consume=consume, fresh=fresh)
        if torch.cuda.is_current_stream_capturing():
            return self._captured(inputs, consume)
        stream = current_stream(self._index)
        user = self._by_stream.get(stream)
        if user is None:
            user = self._by_stream.put(stream, POOLS.of(self._device, stream).enroll(self._layout.arena_bytes))
        return super().__call__(inputs, consume=consume, fresh=fresh, user=user)

    def _captured(self, inputs: Sequence[torch.Tensor], consume: bool) -> list[torch.Tensor]:
        """Runs in memory of the graph that is being captured; the graph may reuse it after the run."""
        pool = ArenaPool(self._device)
        try:
            return super().__call__(inputs, consume=consume, user=pool.enroll(self._layout.arena_bytes))
        finally:
            pool.clear()

    def _load(self, registers: list, inputs: Sequence[torch.Tensor]) -> None:
        super()._load(registers, inputs)
        for slot in range(len(inputs)):
            if registers[slot].data_ptr() % ALIGNMENT:
                registers[slot] = registers[slot].clone(memory_format=torch.contiguous_format)
        self._bring_states(registers)

    def _bring_states(self, registers: list) -> None:
        """Copies generators' states to the device, for this run's kernels."""
        if self._brought:
            memory = VF.empty(len(self._brought), 2, dtype=torch.uint64, device=self._device)
            there = dict(zip(self._brought, memory.unbind(), strict=True))
            bring([(state, registers[slot]) for slot, state in there.items()])
            for slot, state in there.items():
                registers[slot] = state


def _nothing() -> None:
    """No preparation: a launch sets its device itself."""


Range = tuple[int, int]
"""Half-open range of addresses."""

_PATH, _SECOND = 0, 1
_ALL: Range = (0, 1 << 64)


def memory_of(tensors: Sequence[torch.Tensor | None]) -> list[Range]:
    """Address ranges of tensors, each from its first element to its last."""
    found = []
    for tensor in tensors:
        if tensor is not None and (count := tensor.numel()):
            first = tensor.data_ptr()
            span = count if tensor.is_contiguous() else span_of(tensor.shape, tensor.stride())
            found.append((first, first + span * tensor.itemsize))
    return found


class Crossings:
    """Memory use of the steps of two streams, in order → the other stream's step that a step must wait for."""

    def __init__(self) -> None:
        self._memory = _Touched(), _Touched()
        self._launched = [0, 0]
        self._awaited = [0, 0]

    def before(self, stream: int, reads: Sequence[Range], writes: Sequence[Range]) -> int | None:
        """The index of the other stream's last step that a step must wait for; ``None`` if it need not, or has."""
        other = self._memory[1 - stream]
        last = max([*(other.written(each) for each in reads), *(other.touched(each) for each in writes)], default=-1)
        if last < self._awaited[stream]:
            return None
        self._awaited[stream] = last + 1
        return last

    def add(self, stream: int, reads: Sequence[Range], writes: Sequence[Range]) -> None:
        """Notes a launched step."""
        number = self._launched[stream]
        self._launched[stream] += 1
        for each in reads:
            self._memory[stream].mark(each, number, False)
        for each in writes:
            self._memory[stream].mark(each, number, True)


class _Touched:
    """Address ranges → the indices of the last steps that wrote, and that used, each part; -1: none.

    Memory is cut where a range begins or ends.
    """

    def __init__(self) -> None:
        self._cuts = [0]
        self._written, self._touched = [-1], [-1]

    def written(self, memory: Range) -> int:
        """The last step that wrote into any part of a range."""
        return max(self._written[self._parts(memory)])

    def touched(self, memory: Range) -> int:
        """The last step that read or wrote any part of a range."""
        return max(self._touched[self._parts(memory)])

    def mark(self, memory: Range, number: int, is_written: bool) -> None:
        """Notes a step that used a whole range; indices never decrease."""
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


class SecondStream:
    """Launches the steps of captured runs, one run at a time, from :meth:`fork` to :meth:`join`.

    Args:
        steps: indices of second-stream steps.
        beside: a context in which this thread launches on the second stream.
        mark: marks the current end of a stream: 0 is the critical path's, 1 the second stream.
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
        """Starts the second stream after all launches of the path's stream so far, such as copies of inputs."""
        self._begin()
        self._crossings.add(_PATH, [], [_ALL])
        self._marks[_PATH].append(self._mark(_PATH))

    def join(self) -> None:
        """Makes the path wait for all second-stream steps."""
        if self._marks[_SECOND]:
            self._wait(_PATH, self._marks[_SECOND][-1])
        self._begin()

    def launch(self, index: int, step: Instruction, action: Callable[[list], None], registers: list) -> None:
        """Runs a step's action on its stream, after the steps that it must wait for."""
        is_beside = index in self._steps
        stream = _SECOND if is_beside else _PATH
        reads = memory_of([registers[slot] for slot in step.reads])
        given = memory_of([registers[slot] for slot in step.writes])  # a library call's results have no memory yet
        self._run(stream, reads, given, partial(action, registers))
        self._crossings.add(stream, reads, memory_of([registers[slot] for slot in step.writes]))
        if is_beside:  # kept until both are joined: their memory would be reused by the path's next calls
            self._held += [registers[slot] for slot in (*step.reads, *step.writes)]

    def _run(self, stream: int, reads: Sequence[Range], writes: Sequence[Range], action: Callable[[], None]) -> None:
        awaited = self._crossings.before(stream, reads, writes)
        with self._beside() if stream == _SECOND else nullcontext():
            if awaited is not None:
                self._wait(stream, self._marks[1 - stream][awaited])
            action()
            self._marks[stream].append(self._mark(stream))
