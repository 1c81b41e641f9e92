"""Generator states: draws that programs make by themselves → seed and offset before each.

A CUDA generator's seed and offset are read, and the offset is moved on as eager's kernel would, without waiting for the
device. Library functions read the states of placed draws on the host; those that kernels compute masks from
(:mod:`bridge.compile.codegen.philox`) get to the device as a kernel's argument (:mod:`bridge.compile.cuda.copies`).
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
        draws: placed ones, and dropouts whose masks kernels compute.
    """

    def __init__(self, draws: Sequence[Draw]):
        self._device = draws[0].device
        advances = [self._advance(draw) for draw in draws]
        self._before = [sum(advances[:place]) for place in range(len(draws))]
        self._advance_of_all = sum(advances)

    def _advance(self, draw: Draw) -> int:
        if draw.is_placed or draw.is_attention_mask:
            return draw.advance
        return gpu_of(self._device).advance(torch.Size(draw.shape).numel())

    def draw(self, generator: torch.Generator | None, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Seed and offset of each, from the device's default generator: uint64 on the host.

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
        states = torch.tensor([(seed, offset + before) for before in self._before], dtype=torch.uint64)
        return list(states.unbind())
