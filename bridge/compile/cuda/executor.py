"""Executor on a GPU: a program bound to its kernels for one device, on whichever stream torch has current there.

Each stream has a pool of arena blocks of its own: work on one stream runs in the order of the calls, so a block that
was given back may be taken while the GPU still works in it; work on another stream may overlap with it. While torch
captures a CUDA graph, blocks are the graph's: torch's allocator takes their memory from the graph's pool, and a replay
finds it as it was.

Kernels read vectors of 16 bytes: an input that begins elsewhere is copied. States of generators, which a caller has on
the host, are brought to where kernels read them.

SecondStream: a run that is captured, on two streams: the critical path's steps on one, those beside it on another.

Both streams launch in the program's order. A step waits for the last step of the other stream that works on the same
memory, if one of the two writes it. Memory is told by the addresses of the tensors that a step is given: so views,
places of the arena that serve one value after another and tensors of the caller's that overlap are all seen. In the
graph, that is a branch which leaves and joins the path where it has to, and nowhere else.

What torch's kernels allocate while they run comes from memory of their own stream, which no other stream's step is
given before both are joined.
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
from bridge.compile.cuda.copies import bring
from bridge.compile.runtime.executor import Actions, Executor
from bridge.compile.runtime.instructions import Launch
from bridge.compile.runtime.layout import ArenaPool, PoolUser
from bridge.compile.runtime.loop_frame import Instruction
from bridge.compile.runtime.program import Program

__all__ = ["ALIGNMENT", "POOLS", "Crossings", "CudaExecutor", "Range", "SecondStream", "StreamPools", "memory_of"]

#: Bytes, of a kernel's widest access.
ALIGNMENT = 16

_STREAMS = 8
"""In whose blocks a program keeps its registers; those used last."""


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
        """Gives back the blocks that nobody has."""
        for pool in tuple(self._pools.values()):
            pool.clear()


POOLS = SESSION.cache("programs", StreamPools())
"""Of this process."""


class CudaExecutor(Executor):
    """Runs one program on one device; safe to call from any thread. Its first run binds the instructions.

    Args:
        pool: whose blocks each run works in, by :class:`Executor`'s ``__call__``; those of the current stream unless
            given.
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
        """In memory of the graph that is captured, which may serve again once the run is over."""
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
        """To where this run's kernels read them."""
        if self._brought:
            memory = torch.empty(len(self._brought), 2, dtype=torch.uint64, device=self._device)
            there = dict(zip(self._brought, memory.unbind(), strict=True))
            bring([(state, registers[slot]) for slot, state in there.items()])
            for slot, state in there.items():
                registers[slot] = state


def _nothing() -> None:
    """No preparation: a launch sets its device itself."""


Range = tuple[int, int]
"""Addresses from the first to behind the last."""

_PATH, _SECOND = 0, 1
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


class SecondStream:
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
        if self._marks[_SECOND]:
            self._wait(_PATH, self._marks[_SECOND][-1])
        self._begin()

    def begin(self, written: Sequence[torch.Tensor], action: Callable[[], None]) -> None:
        """Runs beside, at once, what writes into tensors: nothing waits for it but who works on these."""
        writes = memory_of(written)
        self._run(_SECOND, [], writes, action)
        self._crossings.add(_SECOND, [], writes)

    def launch(self, index: int, step: Instruction, action: Callable[[list], None], registers: list) -> None:
        """Runs a step's action on its stream, once what it waits for is done."""
        is_beside = index in self._steps
        stream = _SECOND if is_beside else _PATH
        reads = memory_of([registers[slot] for slot in step.reads])
        given = memory_of([registers[slot] for slot in step.writes])  # what a library call returns is nobody's yet
        self._run(stream, reads, given, partial(action, registers))
        self._crossings.add(stream, reads, memory_of([registers[slot] for slot in step.writes]))
        if is_beside:  # until both are joined: their memory would serve the path's next calls
            self._held += [registers[slot] for slot in (*step.reads, *step.writes)]

    def _run(self, stream: int, reads: Sequence[Range], writes: Sequence[Range], action: Callable[[], None]) -> None:
        awaited = self._crossings.before(stream, reads, writes)
        with self._beside() if stream == _SECOND else nullcontext():
            if awaited is not None:
                self._wait(stream, self._marks[1 - stream][awaited])
            action()
            self._marks[stream].append(self._mark(stream))
