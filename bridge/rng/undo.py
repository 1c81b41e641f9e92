"""The default generator after a call: the state that its program's draws leave, or the one before its draws."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bridge.base.threads import others_wait

__all__ = ["go_on", "undo_draws"]


def go_on(before: torch.Tensor, after: torch.Tensor) -> None:
    """Moves torch's default generator to ``after``, if it still is at ``before``: else another thread has drawn."""
    generator = torch.default_generator
    if torch.equal(generator.get_state(), before):
        generator.set_state(after)


def undo_draws(before: torch.Tensor, draw_again: Callable[[], object]) -> None:
    """Puts torch's default generator back, unless another thread has drawn since: its numbers would come again.

    Args:
        before: the generator's state before the draws.
        draw_again: makes the same draws once more, to find out whether the state now is what they leave.
    """
    generator = torch.default_generator
    if others_wait():
        generator.set_state(before)
        return
    now = generator.get_state()
    generator.set_state(before)
    draw_again()
    generator.set_state(before if torch.equal(generator.get_state(), now) else now)
