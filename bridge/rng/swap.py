"""Compare and swap of the default generator's state: nobody else draws between the comparison and the replacement."""

from __future__ import annotations

import functools
import itertools

import torch

from bridge.compile import Built, host_backend, swap_function
from bridge.rng.engine import Layout
from bridge.rng.functions import LOCK, functions, layout_for

__all__ = ["swap_state"]


def swap_state(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Moves torch's default generator to ``after`` if it is at ``before``; whether it did.

    Both as ``get_state`` gives them. In one go under the generator's lock; where that was not found, another thread
    can draw in between.
    """
    layout, generator = layout_for(functions()[1]), torch.default_generator
    if layout is not None and (swap := _checked(layout)) is not None:
        return _swap(swap, layout, generator, before, after)
    if not torch.equal(generator.get_state(), before):
        return False
    generator.set_state(after)
    return True


def _swap(swap: Built, layout: Layout, generator: torch.Generator, before: torch.Tensor, after: torch.Tensor) -> bool:
    twins = [torch.Generator(), torch.Generator()]
    for twin, state in zip(twins, (before, after), strict=True):
        twin.set_state(state)
    (lock, engine), expected, new = (layout.addresses(each) for each in (generator, *twins))
    with LOCK:
        return bool(swap.function(lock, engine, expected[1], new[1]))


@functools.lru_cache(maxsize=1)
def _checked(layout: Layout) -> Built | None:
    """The compiled function, if it works."""
    (swap,) = host_backend().build([("bridge_swap", swap_function())])
    return swap if _works(swap, layout) else None


def _works(swap: Built, layout: Layout) -> bool:
    """Tried on generators of its own: states that differ a little are told apart, and replaced by each other."""
    states = []
    for used, double, single in ((0, 0, 0), (1, 0, 0), (1, 5, 0), (1, 6, 0), (1, 0, 5), (1, 0, 6), (1, 5, 5)):
        generator = torch.Generator().manual_seed(3)
        torch.rand(used, generator=generator)
        state = generator.get_state()
        # the normal numbers that are kept: a float64, whether there is one, a float32 and whether there is one
        state.view(torch.int64)[[628, 630, 631]] = torch.tensor([double, double > 0, (single > 0) << 32 | single])
        states.append(state)
    for now, before, after in itertools.product(states, repeat=3):
        generator = torch.Generator()
        generator.set_state(now)
        swapped = _swap(swap, layout, generator, before, after)
        if swapped is not (now is before) or not torch.equal(generator.get_state(), after if swapped else now):
            return False
    return True
