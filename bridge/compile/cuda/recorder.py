"""CUDA's recorder: programs into CUDA graphs, with memory from private pools of torch's allocator.

What a graph needs while it runs (arena block, temporaries of torch's kernels) is shared by all graphs that are recorded
for one stream: they run in the stream's order, one replay after another. Other runs on the stream, of which several
threads may have one under way, have blocks of their own.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch

from bridge.base.collector import collection_paused
from bridge.base.session import SESSION
from bridge.base.threads import free_in_children
from bridge.base.torch_cuda import current_device, current_stream, empty_strided
from bridge.compile.cuda.copies import bring_anew
from bridge.compile.cuda.driver_graphs import ExecutableGraph, captured, new_stream
from bridge.compile.cuda.executor import SecondStream
from bridge.compile.cuda.memory import PoolMemory, PrivatePool, SlotMemory, spare_bytes, takes_from
from bridge.compile.cuda.piecewise import PiecewiseExecutor, PiecewiseGraphs, inside_of_loops, is_between
from bridge.compile.graphs.recordings import Form, Replay, nbytes
from bridge.compile.runtime.instructions import CallLibrary
from bridge.compile.runtime.layout import ALIGNMENT as ARENA_ALIGNMENT
from bridge.compile.runtime.layout import PoolBlock, PoolUser
from bridge.compile.runtime.program import Program
from bridge.library import DRAWS, REDRAWS, waits_for_the_device
from bridge.trials import RunTimer

__all__ = ["STREAMS", "CudaRecorder", "Streams"]

_RECORDING = free_in_children(threading.RLock())
"""Held while a stream is captured."""

_GROWTH = 1.5
"""Of a block that a stream's recordings share, where a larger one takes its place: earlier recordings keep theirs, and
all of them together are not much more than the last."""

_SAVED = 0.1
"""Of the device's time, that steps beside others are expected to save where a graph pays for that alone."""


class _GraphArena:
    """The block of a stream's recordings, in the place of a pool; larger programs get a larger one."""

    def __init__(self, device: torch.device):
        self._device = device
        self._keys = itertools.count()
        self.block: PoolBlock | None = None

    @torch.inference_mode(False)  # it serves runs of any mode
    def reserve(self, size: int) -> PoolBlock:
        """The block; whoever records holds it."""
        if self.block is None or self.block.size < size:
            least = 0 if self.block is None else int(_GROWTH * self.block.size)
            self.block = PoolBlock(max(size, least), self._device)
        return self.block

    def enroll(self, size: int) -> PoolUser:
        return PoolUser(next(self._keys), partial(self.reserve, size), self.give)

    def give(self, block: PoolBlock) -> None:
        block.bound.clear()  # a program is seldom recorded twice


class _Scratch:
    """Memory of a stream's recordings for what library calls between graphs return, until the replay is over."""

    def __init__(self, device: torch.device):
        self._blocks = _GraphArena(device)
        self._used = 0

    def begin(self) -> None:
        """Another recording: no two are replayed together."""
        self._used = 0

    @torch.inference_mode(False)  # it serves runs of any mode
    def take(self, form: Form) -> torch.Tensor:
        """Memory that this recording has not taken yet."""
        shape, strides, dtype = form
        size = -(-nbytes(form) // ARENA_ALIGNMENT) * ARENA_ALIGNMENT
        before = self._blocks.block
        block = self._blocks.reserve(self._used + size)
        if block is not before:
            self._used = 0
        begin, self._used = self._used, self._used + size
        return block.memory[begin : begin + nbytes(form)].view(dtype).as_strided(shape, strides)

    @property
    def held_bytes(self) -> int:
        """Bytes of the block."""
        return 0 if self._blocks.block is None else self._blocks.block.size

    def clear(self) -> None:
        """Lets go of it; recordings hold what they took."""
        self._blocks.block = None


class _Stream:
    """What the recordings of one stream share; ``side`` is captured in its place, by nobody else.

    Attributes:
        beside: captured with it, for branches.
        replaying: held during a replay, which may be several launches.
    """

    def __init__(self, device: torch.device):
        self.replaying = free_in_children(threading.Lock())
        self.arena, self.scratch = _GraphArena(device), _Scratch(device)
        self.temporaries = PrivatePool(device.index)
        self.side, self.beside = (torch.cuda.ExternalStream(new_stream(), device) for _ in range(2))


class Streams:
    """By device and stream, what their recordings share."""

    def __init__(self) -> None:
        self._of: dict[tuple[int, int], _Stream] = {}
        self._left: list[_Stream] = []

    def of(self, device: torch.device, stream: int) -> _Stream:
        """Of a stream on a device, which is current."""
        found = self._of.get((device.index, stream))
        return found or self._of.setdefault((device.index, stream), _Stream(device))

    def leave(self, device: torch.device, stream: int) -> None:
        """The stream's next recordings share something new: a capture that failed may have left its side stream unfit.

        What cuBLAS works in may lie in the old one's memory, which stays.
        """
        found = self._of.pop((device.index, stream), None)
        if found is not None:
            found.arena.block = None
            found.scratch.clear()
            self._left.append(found)

    @property
    def held_bytes(self) -> int:
        """Bytes of blocks, and of temporaries of torch's kernels."""
        streams = tuple(self._of.values())
        blocks = [each.arena.block for each in streams if each.arena.block is not None]
        return sum(block.size for block in blocks) + sum(
            each.scratch.held_bytes + each.temporaries.held_bytes for each in streams
        )

    def clear(self) -> None:
        """Lets go of the blocks; recordings hold theirs."""
        for each in tuple(self._of.values()):
            each.arena.block = None
            each.scratch.clear()


STREAMS = SESSION.cache("programs", Streams())
"""Of this process."""


class CudaRecorder:
    """Records one program, see :class:`bridge.compile.graphs.recordings.GraphRecorder`."""

    def __init__(self, program: Program, device: torch.device):
        self._program, self._device, self._index = program, device, device.index
        self._executors: dict[int, tuple[_Stream, PiecewiseExecutor]] = {}

    def refusal(self) -> str | None:
        steps = self._program.steps
        captured = [*(step for step in steps if not is_between(step)), *inside_of_loops(steps)]
        for step in (each for each in captured if isinstance(each, CallLibrary)):
            if step.name in DRAWS - REDRAWS:
                return f"library {step.name} draws random numbers"
            if operator := waits_for_the_device(step.name, step.attrs):
                return f"{operator} waits for the device"
        return None

    @property
    def overlaps(self) -> bool:
        return self._program.beside.saved >= _SAVED

    def spare_bytes(self, wanted: int) -> int:
        return spare_bytes(self._index, wanted)

    def elsewhere(self) -> AbstractContextManager | None:
        return None if current_device() == self._index else torch.cuda.device(self._index)

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def stream(self) -> int:
        return current_stream(self._index)

    def memory(self, varies: bool = False, joined: bool = False) -> PoolMemory | SlotMemory:
        return SlotMemory(self._index) if varies else PoolMemory(self._index, joined)

    def empty(self, form: Form) -> torch.Tensor:
        return empty_strided(*form)

    def timer(self) -> RunTimer:
        return RunTimer()

    def record(
        self, inputs: Sequence[torch.Tensor], fresh: Sequence[torch.Tensor], copies: Sequence[tuple[int, torch.Tensor]]
    ) -> Replay:
        stream = self.stream()
        shared = STREAMS.of(self._device, stream)
        of, execute = self._executors.get(stream, (None, None))
        if of is not shared:
            actions = self._program.executor.actions
            execute = PiecewiseExecutor(self._program, self._device, shared.arena, actions)
            self._executors[stream] = shared, execute
        block = shared.arena.reserve(self._program.arena_bytes)
        shared.scratch.begin()
        branches = _branches(self._program.beside.spans, shared) if self._program.beside.spans else None
        launch = partial(_launched, stream=stream, execute=execute)
        pieces = PiecewiseGraphs(partial(self._captured, shared), launch)
        # collecting garbage may free memory of the device, which is not allowed during a capture
        with _RECORDING, collection_paused():
            try:
                with pieces, execute.recorded_by(pieces, shared.scratch.take, copies, branches, True):
                    results = execute(inputs, fresh=fresh)
                    for place, memory in copies:
                        if results[place] is not memory:
                            memory.copy_(results[place])
                    del results  # temporaries are given back while they are the stream's
            except BaseException:
                STREAMS.leave(self._device, stream)
                raise
        return _replay(pieces.parts, shared.replaying, (execute, block, shared))

    @contextmanager
    def _captured(self, shared: _Stream) -> Iterator[list[ExecutableGraph]]:
        """What this thread launches goes into a graph, for which it may allocate."""
        with torch.cuda.stream(shared.side), shared.temporaries:
            _require_memory_of(shared.temporaries)
            with captured(shared.side.cuda_stream) as made:
                yield made


def _branches(steps: Collection[int], shared: _Stream) -> SecondStream:
    """SecondStream of these steps on a stream's two."""
    streams = shared.side, shared.beside
    return SecondStream(
        steps,
        partial(torch.cuda.stream, shared.beside),
        lambda number: streams[number].record_event(),
        lambda number, event: streams[number].wait_event(event),
    )


def _launched(graph: ExecutableGraph, stream: int, execute: PiecewiseExecutor) -> Replay:
    """What launches a graph of a run, with the states of a call where it brings some."""
    launch, brought = graph.launcher(stream), execute.brought
    anew = bring_anew(graph, list(brought.values())) if execute.captures_states else None
    if anew is None:
        return launch

    def replay(given: Sequence[torch.Tensor]) -> None:
        anew([given[slot] for slot in brought])
        launch()

    return replay


def _replay(parts: Sequence[Replay], replaying: AbstractContextManager, needs: object) -> Replay:
    """The parts one after another, with nobody's in between; ``needs``: what is to live as long."""

    def replay(given: Sequence[torch.Tensor], _needs: object = needs) -> None:
        with replaying:
            for part in parts:
                part(given)

    return replay


def _require_memory_of(pool: PrivatePool) -> None:
    """``RuntimeError`` if this thread's memory comes from elsewhere: a pool that the user has put in use goes first,
    and what a graph needs while it runs would be handed to others."""
    if not takes_from(pool.segments):
        raise RuntimeError("memory comes from a pool that is not ours")
