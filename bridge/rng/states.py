"""Generator states: draws that programs make by themselves → seed and offset before each.

A CUDA generator's seed and offset are read, and the offset is moved on as eager's kernel would, without waiting for the
device. Kernels that compute masks (:mod:`bridge.compile.codegen.philox`) read the states there, where they come in one
copy from pinned memory; library functions read those of placed draws on the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bridge.base.generators import MOVING, default_generator
from bridge.capture import Draw
from bridge.compile import gpu_of

__all__ = ["GeneratorStates"]


class GeneratorStates:
    """The states before draws that follow each other on one device.

    Args:
        draws: placed ones, whose states are read on the host, and fused dropouts, whose states kernels read.
    """

    def __init__(self, draws: Sequence[Draw]):
        self._device = draws[0].device
        self._on_host = [draw.is_placed for draw in draws]
        self._advances = [self._advance(draw) for draw in draws]

    def _advance(self, draw: Draw) -> int:
        return draw.advance if draw.is_placed else gpu_of(self._device).advance(torch.Size(draw.shape).numel())

    def draw(self, generator: torch.Generator | None, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Seed and offset of each, from the device's default generator: int64 on the device, or uint64 on the host.

        Args:
            generator: another one is moved on as far, and nothing is made.
        """
        if generator is not None:
            generator.set_offset(generator.get_offset() + sum(self._advances))
            return []
        generator = default_generator(self._device)
        with MOVING:
            seed, offset = generator.initial_seed(), generator.get_offset()
            generator.set_offset(offset + sum(self._advances))
        rows = []
        for advance in self._advances:
            rows.append((seed, offset))
            offset += advance
        host = torch.tensor(rows, dtype=torch.uint64)
        if all(self._on_host):
            return list(host.unbind())
        there = host.view(torch.int64).pin_memory().to(self._device, non_blocking=True)
        return [(host if on_host else there)[place] for place, on_host in enumerate(self._on_host)]
