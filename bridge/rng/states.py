"""Generator states: masks that kernels compute (:mod:`bridge.compile.codegen.philox`) → seed and offset of each.

A CUDA generator's seed and offset are read, and the offset is moved on as eager's kernel would, without waiting for the
device: the states travel there in one copy from pinned memory.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from bridge.base.generators import default_generator
from bridge.base.locks import free_in_children
from bridge.capture import Draw
from bridge.compile import gpu_of

__all__ = ["GeneratorStates"]

_LOCK = free_in_children(threading.Lock())
"""Held from reading an offset to moving it: of two threads that draw here, one is first."""


class GeneratorStates:
    """The states before dropouts that follow each other on one device.

    Args:
        draws: of fused dropouts.
    """

    def __init__(self, draws: Sequence[Draw]):
        self._device = draws[0].device
        gpu = gpu_of(self._device)
        self._advances = [gpu.advance(torch.Size(draw.shape).numel()) for draw in draws]

    def draw(self, generator: torch.Generator | None, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Seed and offset of each, int64 on the device, from its default generator.

        Args:
            generator: another one is moved on as far, and nothing is made.
        """
        if generator is not None:
            generator.set_offset(generator.get_offset() + sum(self._advances))
            return []
        generator = default_generator(self._device)
        with _LOCK:
            seed, offset = generator.initial_seed(), generator.get_offset()
            generator.set_offset(offset + sum(self._advances))
        rows = []
        for advance in self._advances:
            rows.append((seed - (seed >> 63 << 64), offset))
            offset += advance
        host = torch.tensor(rows, dtype=torch.int64).pin_memory()
        return list(host.to(self._device, non_blocking=True).unbind())
