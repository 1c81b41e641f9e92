"""Masks of attention's weights by torch: an observed dropout inside of the efficient kernel → what it drops.

The kernel keeps its mask to itself, and gives it away where each key's value is a row of its own: with equal scores, a
result's element says whether the weight of that key was kept. So the mask and what it adds to the generator's offset
are eager's own. Where kernels compute masks (:mod:`bridge.rng.computed`), only the check of the rule asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bridge.base.torch_internals import aten
from bridge.capture import Draw

__all__ = ["AttentionMask", "mask_of_attention"]

_UNIT = 8
"""Elements of a row at a multiple of which rows begin: 16 bytes of any type."""


def mask_of_attention(shape: Sequence[int], rate: float, device: torch.device) -> torch.Tensor:
    """The mask that the efficient kernel draws for weights of (batch, head, row, column); it moves the generator."""
    batch, heads, rows, columns = shape
    query, key = (torch.zeros(batch, heads, each, _UNIT, device=device) for each in (rows, columns))
    value = torch.eye(columns, -(-columns // _UNIT) * _UNIT, device=device).expand(batch, heads, -1, -1)
    kernel = aten._scaled_dot_product_efficient_attention
    return kernel(query, key, value, None, False, rate, False, scale=1.0)[0][..., :columns] > 0


class AttentionMask:
    """The mask of one attention's weights, in memory.

    Args:
        draw: whose ``is_attention_mask`` is true.
    """

    def __init__(self, draw: Draw):
        self._draw = draw

    def draw(self, generator: torch.Generator | None, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The mask, from the device's default generator.

        Args:
            generator: another one is moved on as far, and nothing is drawn: the operator takes none.
        """
        draw = self._draw
        if generator is not None:
            generator.set_offset(generator.get_offset() + draw.advance)
            return []
        with torch.no_grad():
            return [mask_of_attention(draw.shape, draw.args[0], draw.device).contiguous()]
