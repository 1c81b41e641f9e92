"""Executor on a GPU: a program bound to its kernels for one device, on whichever stream torch has current there.

Each stream has a pool of arena blocks of its own: work on one stream runs in the order of the calls, so a block that
was given back may be taken while the GPU still works in it; work on another stream may overlap with it. While torch
captures a CUDA graph, blocks are the graph's: torch's allocator takes their memory from the graph's pool, and a replay
finds it as it was.

Kernels read vectors of 16 bytes: an input that begins elsewhere is copied. States of generators, which a caller has on
the host, are brought to where kernels read them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TypeVar

import torch

from bridge.base.lru import LeastRecentlyUsed
from bridge.base.threads import free_in_children
from bridge.base.torch_cuda import current_device, current_stream, empty_strided
from bridge.compile.cuda.copies import bring
from bridge.compile.runtime.executor import Actions, Executor, bind_all
from bridge.compile.runtime.instructions import Launch
from bridge.compile.runtime.pool import ArenaPool
from bridge.compile.runtime.program import Program

__all__ = ["ALIGNMENT", "POOLS", "BoundExecutor", "CudaExecutor", "StreamPools"]

#: Bytes, of a kernel's widest access.
ALIGNMENT = 16

_STREAMS = 8
"""On which an executor stays bound; those used last."""

Bound = TypeVar("Bound", bound="BoundExecutor")


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


POOLS = StreamPools()
"""Of this process."""


class CudaExecutor:
    """Runs one program on one device; safe to call from any thread.

    Attributes:
        name: of the program.
        steps: its instructions.
    """

    def __init__(self, program: Program, device: torch.device):
        self.name, self.steps = program.name, program.steps
        self._device, self._index = device, device.index
        constants = tuple((slot, tensor.to(device)) for slot, tensor in program.constants)
        actions = cache(partial(bind_all, program.steps, program.layout, constants, program.code))
        self._bound: Callable[..., BoundExecutor] = partial(_bound, program, constants, device, actions)
        self._by_stream: LeastRecentlyUsed[int, BoundExecutor] = LeastRecentlyUsed(_STREAMS)

    def __call__(
        self,
        inputs: Sequence[torch.Tensor],
        *,
        consume: bool = False,
        fresh: Sequence[torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        """See :meth:`bridge.compile.runtime.executor.Executor.__call__`."""
        if current_device() != self._index:
            with torch.cuda.device(self._index):
                return self(inputs, consume=consume, fresh=fresh)
        if torch.cuda.is_current_stream_capturing():
            return self._captured(inputs, consume)
        stream = current_stream(self._index)
        execute = self._by_stream.get(stream)
        if execute is None:
            execute = self._by_stream.put(stream, self._bound(pool=POOLS.of(self._device, stream)))
        return execute(inputs, consume=consume, fresh=fresh)

    def bound_to(self, pool: ArenaPool, kind: type[Bound]) -> Bound:
        """The program bound to blocks of a pool, by an executor of this kind."""
        return self._bound(pool=pool, kind=kind)

    def _captured(self, inputs: Sequence[torch.Tensor], consume: bool) -> list[torch.Tensor]:
        """In memory of the graph that is captured, which may serve again once the run is over."""
        pool = ArenaPool(self._device)
        try:
            return self._bound(pool=pool)(inputs, consume=consume)
        finally:
            pool.clear()


class BoundExecutor(Executor):
    """A program bound to one pool."""

    def __init__(self, *parts, device: torch.device, pool: ArenaPool, actions: Actions):
        super().__init__(*parts, device=device, prepare=_nothing, empty=empty_strided, pool=pool, actions=actions)
        read = {slot for step in self.steps if isinstance(step, Launch) for slot in step.reads}
        self._device = device
        self._brought = [param.slot for param in self._layout.params if param.lies_on_host and param.slot in read]

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


def _bound(
    program: Program,
    constants: Sequence[tuple[int, torch.Tensor]],
    device: torch.device,
    actions: Callable[[], Actions],
    *,
    pool: ArenaPool,
    kind: type[BoundExecutor] = BoundExecutor,
) -> BoundExecutor:
    parts = program.name, program.steps, program.layout, constants, program.code
    return kind(*parts, device=device, pool=pool, actions=actions())


def _nothing() -> None:
    """No preparation: a launch sets its device itself."""
