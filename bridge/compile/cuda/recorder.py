"""CUDA's recorder: programs into CUDA graphs, with memory from private pools of torch's allocator.

All graphs recorded for one stream share working memory (arena block, temporaries of torch's kernels): they run one
after another. Other runs on the stream, possibly in several threads at once, have blocks of their own.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch

from bridge.base.collector import collection_paused
from bridge.base.session import SESSION
from bridge.base.threads import free_in_children
from bridge.base.torch_cuda import current_device, current_stream, empty_strided
from bridge.compile.cuda.driver_graphs import ExecutableGraph, captured, new_stream
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
"""Growth factor of a stream's shared block: the smaller blocks of earlier recordings then sum up to about the last."""


class _GraphArena:
    """The blocks of a stream's recordings, in place of a pool: a larger one for a larger program.

    Attributes:
        blocks: the blocks that a recording keeps alive.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._keys = itertools.count()
        self.blocks: weakref.WeakSet[PoolBlock] = weakref.WeakSet()

    @torch.inference_mode(False)  # it serves runs of any mode
    def reserve(self, size: int) -> PoolBlock:
        """The smallest block of at least ``size`` bytes; each recording keeps its own alive."""
        blocks = sorted(self.blocks, key=lambda block: block.size)
        fitting = [block for block in blocks if block.size >= size]
        if fitting:
            return fitting[0]
        block = PoolBlock(max([size, *(int(_GROWTH * block.size) for block in blocks)]), self._device)
        self.blocks.add(block)
        return block

    def enroll(self, size: int) -> PoolUser:
        return PoolUser(next(self._keys), partial(self.reserve, size), self.give)

    def give(self, block: PoolBlock) -> None:
        block.bound.clear()  # a program is seldom recorded twice


class _Scratch:
    """Memory of a stream's recordings for results of library calls between graphs, valid until the replay ends."""

    def __init__(self, device: torch.device):
        self._device = device
        self._block: PoolBlock | None = None
        self._used = 0

    def begin(self) -> None:
        """Starts another recording, which reuses the memory: no two are replayed at once."""
        self._used = 0

    @torch.inference_mode(False)  # it serves runs of any mode
    def take(self, form: Form) -> torch.Tensor:
        """Memory that this recording does not use yet."""
        shape, strides, dtype = form
        size = -(-nbytes(form) // ARENA_ALIGNMENT) * ARENA_ALIGNMENT
        if self.held_bytes < self._used + size:
            self._block, self._used = PoolBlock(max(size, int(_GROWTH * self.held_bytes)), self._device), 0
        begin, self._used = self._used, self._used + size
        return self._block.memory[begin : begin + nbytes(form)].view(dtype).as_strided(shape, strides)

    @property
    def held_bytes(self) -> int:
        """Bytes of the block."""
        return 0 if self._block is None else self._block.size

    def clear(self) -> None:
        """Drops the block; recordings keep their parts alive."""
        self._block = None


class _Stream:
    """State that the recordings of one stream share; ``side`` is captured in the stream's place, and used only here.

    ``replaying``: held during a replay, which may be several launches.
    """

    def __init__(self, device: torch.device):
        self.replaying = free_in_children(threading.Lock())
        self.arena, self.scratch = _GraphArena(device), _Scratch(device)
        self.temporaries = PrivatePool(device.index)
        self.side = torch.cuda.ExternalStream(new_stream(), device)


class Streams:
    """(device, stream) → the state of its recordings."""

    def __init__(self) -> None:
        self._of: dict[tuple[int, int], _Stream] = {}
        self._left: list[_Stream] = []

    def of(self, device: torch.device, stream: int) -> _Stream:
        """The state of a stream on a device, which must be current."""
        found = self._of.get((device.index, stream))
        return found or self._of.setdefault((device.index, stream), _Stream(device))

    def leave(self, device: torch.device, stream: int) -> None:
        """Gives the stream's next recordings a new state: a failed capture may have left its side stream unusable.

        The old state is kept: cuBLAS's workspace may be in its memory.
        """
        found = self._of.pop((device.index, stream), None)
        if found is not None:
            found.scratch.clear()
            self._left.append(found)

    @property
    def held_bytes(self) -> int:
        """Bytes of blocks, and of temporaries of torch's kernels."""
        return sum(
            sum(block.size for block in each.arena.blocks) + each.scratch.held_bytes + each.temporaries.held_bytes
            for each in tuple(self._of.values())
        )

    def clear(self) -> None:
        """Drops the memory that no recording keeps."""
        for each in tuple(self._of.values()):
            each.scratch.clear()


STREAMS = SESSION.cache("programs", Streams())
"""The process's streams."""


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
            if step.name == "collective":
                return "a collective waits for other processes"
            if step.name in ("apply_opaque", "backward_opaque"):
                return "an autograd.Function runs its own Python code"
            if operator := waits_for_the_device(step.name, step.attrs):
                return f"{operator} waits for the device"
        return None

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
            execute = PiecewiseExecutor(self._program, self._device, shared.arena)
            self._executors[stream] = shared, execute
        block = shared.arena.reserve(self._program.arena_bytes)
        shared.scratch.begin()
        pieces = PiecewiseGraphs(partial(self._captured, shared), lambda graph: graph.launcher(stream))
        # garbage collection may free memory of the device, which is not allowed during a capture
        with _RECORDING, collection_paused():
            try:
                with pieces, execute.recorded_by(pieces, shared.scratch.take, copies):
                    results = execute(inputs, fresh=fresh)
                    for place, memory in copies:
                        if results[place] is not memory:
                            memory.copy_(results[place])
                    del results  # frees temporaries while the stream's pool is current
            except BaseException:
                STREAMS.leave(self._device, stream)
                raise
        return _replay(pieces.parts, shared.replaying, (execute, block, shared))

    @contextmanager
    def _captured(self, shared: _Stream) -> Iterator[list[ExecutableGraph]]:
        """Captures this thread's launches into a graph; allocations come from the stream's pool."""
        with torch.cuda.stream(shared.side), shared.temporaries:
            _require_memory_of(shared.temporaries)
            with captured(shared.side.cuda_stream) as made:
                yield made


def _replay(parts: Sequence[Replay], replaying: AbstractContextManager, needs: object) -> Replay:
    """Runs the parts in order, exclusively; ``needs``: kept alive with the function."""

    def replay(given: Sequence[torch.Tensor], _needs: object = needs) -> None:
        with replaying:
            for part in parts:
                part(given)

    return replay


def _require_memory_of(pool: PrivatePool) -> None:
    """``RuntimeError`` if this thread allocates elsewhere: a pool that the user has put in use takes precedence, and
    would hand the graph's working memory to others."""
    if not takes_from(pool.segments):
        raise RuntimeError("memory comes from a pool that is not ours")
