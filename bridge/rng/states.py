"""Generator states: draws that programs make by themselves → seed and offset before each.

A CUDA generator's seed and offset are read, and the offset is moved on as eager's kernel would, without waiting for the
device. Kernels that compute masks (:mod:`bridge.compile.codegen.philox`) read the states there; library functions read
those of placed draws on the host.

States get to the device as a kernel's argument: the offset is a number that one addition adds to what all calls with a
seed have in common. They lie in memory of their own: a recorded graph has their address in it, which is to come back.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from bridge.base.generators import MOVING, default_generator
from bridge.base.lru import LeastRecentlyUsed
from bridge.base.torch_cuda import current_device, current_stream, reinterpreted
from bridge.capture import Draw
from bridge.compile import Memory, gpu_of, private_memory

__all__ = ["GeneratorStates"]

_TABLES = 8
"""Seeds and streams whose tables are kept; those used last."""


class GeneratorStates:
    """The states before draws that follow each other on one device.

    Args:
        draws: placed ones, whose states are read on the host, and fused dropouts, whose states kernels read.
    """

    def __init__(self, draws: Sequence[Draw]):
        self._device = draws[0].device
        self._on_host = [draw.is_placed for draw in draws]
        self._advances = [self._advance(draw) for draw in draws]
        self._before = [sum(self._advances[:place]) for place in range(len(draws))]
        self._advance_of_all = sum(self._advances)
        self._are_on_host, self._are_there = all(self._on_host), not any(self._on_host)
        self._tables: LeastRecentlyUsed[tuple[int, int], tuple[torch.Tensor, ...]] = LeastRecentlyUsed(_TABLES)
        self._form = (len(draws), 2), (2, 1), torch.int64

    def _advance(self, draw: Draw) -> int:
        if draw.is_placed or draw.is_attention_mask:
            return draw.advance
        return gpu_of(self._device).advance(torch.Size(draw.shape).numel())

    def draw(self, generator: torch.Generator | None, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Seed and offset of each, from the device's default generator: int64 on the device, or uint64 on the host.

        Args:
            generator: another one is moved on as far, and nothing is made.
        """
        if generator is not None:
            generator.set_offset(generator.get_offset() + self._advance_of_all)
            return []
        generator = default_generator(self._device)
        with MOVING:
            seed, offset = generator.initial_seed(), generator.get_offset()
            generator.set_offset(offset + self._advance_of_all)
        if self._are_there:
            return self._there(seed, offset)
        rows = [(seed, offset + before) for before in self._before]
        host = torch.tensor(rows, dtype=torch.uint64).unbind()
        if self._are_on_host:
            return list(host)
        there = self._there(seed, offset)
        return [(host if on_host else there)[place] for place, on_host in enumerate(self._on_host)]

    def _there(self, seed: int, offset: int) -> list[torch.Tensor]:
        """The states on the device."""
        if current_device() != self._device.index:
            with torch.cuda.device(self._device):
                return self._there(seed, offset)
        key = seed, current_stream(self._device.index)
        table, ones = self._tables.get(key) or self._tables.put(key, self._table(seed))
        (states,) = _memory(self._device.index)([self._form])
        torch.add(table, ones, alpha=offset - (offset >> 63 << 64), out=states)
        return [reinterpreted(states, (2,), (1,), 2 * place) for place in range(len(self._before))]

    @torch.inference_mode(False)  # it serves calls of any mode
    def _table(self, seed: int) -> tuple[torch.Tensor, ...]:
        """The states at an offset of 0, and what an offset is to be multiplied with; for the stream that is current."""
        rows = [[(seed, before) for before in self._before], [(0, 1) for _ in self._before]]
        host = torch.tensor(rows, dtype=torch.uint64).view(torch.int64).pin_memory()
        return host.to(self._device, non_blocking=True).unbind()


@functools.cache
def _memory(index: int) -> Memory:
    return private_memory(index)
