"""Executor on a GPU: a program bound to its kernels for one device, on torch's current stream of that device.

Each stream has a pool of arena blocks of its own: work on one stream runs in the order of the calls, so a block that
was given back may be taken while the GPU still works in it; work on another stream may overlap with it. While torch
captures a CUDA graph, blocks come from the graph's pool, and a replay finds them unchanged.

Kernels read vectors of 16 bytes: a misaligned input is copied. Generators' states are copied from host to device.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from bridge.base.lru import LeastRecentlyUsed
from bridge.base.session import SESSION
from bridge.base.threads import free_in_children
from bridge.base.torch_cuda import current_device, current_stream, empty_strided
from bridge.base.torch_internals import VF
from bridge.compile.cuda.copies import bring
from bridge.compile.runtime.executor import Executor
from bridge.compile.runtime.instructions import Launch
from bridge.compile.runtime.layout import ArenaPool, PoolUser
from bridge.compile.runtime.program import Program

__all__ = ["ALIGNMENT", "POOLS", "CudaExecutor", "StreamPools"]

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

    def __init__(self, program: Program, device: torch.device, pool: ArenaPool | None = None):
        super().__init__(program, device, prepare=_nothing, empty=empty_strided, pool=pool)
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
