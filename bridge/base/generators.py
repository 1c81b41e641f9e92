"""torch's default generators: a device → the generator that its draws take numbers from.

A CUDA generator is a seed and an offset, kept on the host: to read or to set them waits for no kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from bridge.base.devices import HOST

__all__ = ["default_generator", "generator_device", "gpus_in_use", "of_gpus", "on_side_states"]


def generator_device(device: torch.device) -> torch.device:
    """The device whose default generator a draw on ``device`` takes numbers from, with its index."""
    if device.type != "cuda":
        return HOST
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())


def default_generator(device: torch.device) -> torch.Generator:
    """torch's default generator of a device."""
    owner = generator_device(device)
    return torch.default_generator if owner == HOST else torch.cuda.default_generators[owner.index]


def of_gpus() -> list[torch.Generator]:
    """The default generators of all GPUs; none before CUDA is initialized, which this does not do."""
    return list(torch.cuda.default_generators) if torch.cuda.is_initialized() else []


def gpus_in_use() -> list[int]:
    """Indices of all GPUs, for ``torch.random.fork_rng``; none before CUDA is initialized."""
    return list(range(len(of_gpus())))


@contextmanager
def on_side_states(generator: torch.Generator, side: torch.Generator) -> Iterator[None]:
    """While active, a default generator is where another one is; then that goes on from there, and it is put back.

    For operators that take no generator. What another thread draws from it meanwhile would come again.
    """
    before = generator.get_state()
    generator.set_state(side.get_state())
    try:
        yield
    finally:
        side.set_state(generator.get_state())
        generator.set_state(before)
