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

__all__ = ["GeneratorStates", "states_of_masks", "states_of_placed"]


class GeneratorStates:
    """The states before draws that follow each other on one device.

    Args:
        device: a GPU.
        advances: how far each draw moves the offset.
        on_host: whether the states are read there.
    """

    def __init__(self, device: torch.device, advances: Sequence[int], *, on_host: bool):
        self._device, self._advances, self._on_host = device, advances, on_host

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
        if self._on_host:
            return list(host.unbind())
        host = host.view(torch.int64).pin_memory()
        return list(host.to(self._device, non_blocking=True).unbind())


def states_of_masks(draws: Sequence[Draw]) -> GeneratorStates:
    """The states before fused dropouts on one device whose masks kernels compute."""
    gpu = gpu_of(draws[0].device)
    advances = [gpu.advance(torch.Size(draw.shape).numel()) for draw in draws]
    return GeneratorStates(draws[0].device, advances, on_host=False)


def states_of_placed(draws: Sequence[Draw]) -> GeneratorStates:
    """The states before placed draws on one device, each of which was measured."""
    return GeneratorStates(draws[0].device, [draw.advance for draw in draws], on_host=True)
