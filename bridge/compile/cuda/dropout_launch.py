"""Launch of torch's fused dropout on a GPU: number of elements → threads, numbers per thread, the generator's advance.

Eager's mask depends on them: thread t of the launch draws from subsequence t of the generator's seed, four numbers a
call, and every launch moves the generator's offset on by as many numbers as a thread may take.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from autodiff.extents import Dim, minimum

__all__ = ["BLOCK", "NUMBERS", "Gpu", "gpu_of"]

BLOCK = 256
"""Threads of a block."""
NUMBERS = 4
"""Numbers of one call of the generator."""


@dataclass(frozen=True)
class Gpu:
    """What of a GPU's size the launch depends on.

    Attributes:
        processors: its multiprocessors.
        threads: how many threads fit on one of them.
    """

    processors: int
    threads: int

    @property
    def most_threads(self) -> int:
        """Threads of the largest launch."""
        return self.processors * (self.threads // BLOCK) * BLOCK

    def launched(self, count: Dim) -> Dim:
        """Threads of the launch for so many elements, at least one."""
        return minimum(self.most_threads, (count + BLOCK - 1) // BLOCK * BLOCK)

    def advance(self, count: int) -> int:
        """What eager adds to the generator's offset."""
        return ((count - 1) // (self.launched(count) * NUMBERS) + 1) * NUMBERS


def gpu_of(device: torch.device) -> Gpu:
    """A CUDA device's size."""
    found = torch.cuda.get_device_properties(device)
    return Gpu(found.multi_processor_count, found.max_threads_per_multi_processor)
