"""Draws of a call that is given up: a default generator is put back, unless another thread has drawn since."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bridge.base.devices import HOST
from bridge.base.generators import default_generator
from bridge.rng.swap import swap_state

__all__ = ["undo_draws"]


def undo_draws(
    before: torch.Tensor, draw_again: Callable[[torch.Generator], object], device: torch.device = HOST
) -> None:
    """Puts a device's default generator back to ``before`` if it is where the draws leave it.

    If it is not, another thread has drawn, before, between or after them, and its numbers must not come again. A GPU's
    generator has no lock that we could take: another thread can draw between the comparison and the replacement.

    Args:
        before: the generator's state before the draws.
        draw_again: makes the same draws once more, from a generator.
    """
    twin = torch.Generator(device)
    twin.set_state(before)
    draw_again(twin)
    after, generator = twin.get_state(), default_generator(device)
    if device == HOST:
        swap_state(after, before)
    elif torch.equal(generator.get_state(), after):
        generator.set_state(before)
