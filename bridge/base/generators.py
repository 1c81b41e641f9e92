"""torch's default generators: a device → the generator of its draws.

A CUDA generator is a seed and an offset, kept on the host: reading or setting them waits for no kernel.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from bridge.base.devices import HOST
from bridge.base.threads import free_in_children

MOVING = free_in_children(threading.RLock())
"""Held while a GPU's generator is read and moved, or temporarily set elsewhere."""


def generator_device(device: torch.device) -> torch.device:
    """The device whose default generator serves draws on ``device``, with its index."""
    if device.type != "cuda":
        return HOST
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())


def default_generator(device: torch.device) -> torch.Generator:
    """torch's default generator of a device."""
    owner = generator_device(device)
    return torch.default_generator if owner == HOST else torch.cuda.default_generators[owner.index]


def offset_of(generator: torch.Generator) -> int | None:
    """A GPU generator's offset since its seeding; ``None`` for the host's generator, which has no offset."""
    return None if generator.device == HOST else generator.get_offset()


def of_gpus() -> list[torch.Generator]:
    """The default generators of all GPUs; none before CUDA is initialized (this does not initialize it)."""
    return list(torch.cuda.default_generators) if torch.cuda.is_initialized() else []


def gpus_in_use() -> list[int]:
    """Indices of all GPUs, for ``torch.random.fork_rng``; none before CUDA is initialized."""
    return list(range(len(of_gpus())))


@contextmanager
def states_put_back(generators: Iterable[torch.Generator]) -> Iterator[None]:
    """Restores generator states at the end; draws of other threads meanwhile are drawn again."""
    states = [(generator, generator.get_state()) for generator in generators]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


@contextmanager
def on_side_states(generator: torch.Generator, side: torch.Generator) -> Iterator[None]:
    """While active, a default generator has the state of ``side``; then ``side`` takes its state, and it is restored.

    For operators that take no generator. Draws of other threads meanwhile may be drawn again.
    """
    with MOVING:
        before = generator.get_state()
        generator.set_state(side.get_state())
        try:
            yield
        finally:
            side.set_state(generator.get_state())
            generator.set_state(before)


@contextmanager
def at_state(generator: torch.Generator, seed: int, offset: int) -> Iterator[None]:
    """While active, a GPU's generator is at this seed and offset; restores it at the end.

    For operators that take no generator. Draws of other threads meanwhile use this state, and do not advance it.
    """
    with MOVING:
        before = generator.initial_seed(), generator.get_offset()
        _move(generator, seed, offset)
        try:
            yield
        finally:
            _move(generator, *before)


def own_at(device: torch.device, state: torch.Tensor) -> torch.Generator:
    """A new generator at a seed and an offset; on the host, which has no offsets, seeded with their sum."""
    seed, offset = state.tolist()
    if device.type == HOST.type:
        return torch.Generator().manual_seed((seed + offset) % 2**63)
    generator = torch.Generator(device).manual_seed(seed)
    generator.set_offset(offset)
    return generator


def _move(generator: torch.Generator, seed: int, offset: int) -> None:
    if generator.initial_seed() != seed:
        generator.manual_seed(seed)
    generator.set_offset(offset)
