"""Draws of a call that is given up: the default generator is put back, unless another thread has drawn since."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bridge.rng.swap import swap_state

__all__ = ["undo_draws"]


def undo_draws(before: torch.Tensor, draw_again: Callable[[torch.Generator], object]) -> None:
    """Puts torch's default generator back to ``before`` if it is where the draws leave it.

    If it is not, another thread has drawn, before, between or after them, and its numbers must not come again.

    Args:
        before: the generator's state before the draws.
        draw_again: makes the same draws once more, from a generator.
    """
    twin = torch.Generator()
    twin.set_state(before)
    draw_again(twin)
    swap_state(twin.get_state(), before)
