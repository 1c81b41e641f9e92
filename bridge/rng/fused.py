"""Masks of fused dropout by torch: an observed ``native_dropout``, a GPU's dropout → its mask, by eager's own kernel.

The kernel takes a tensor, whose type, strides and 16-byte alignment decide which element gets which number. So it is
run on one of eager's layout, with whatever numbers; the mask, and what it adds to the generator's offset, are eager's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bridge.base.devices import HOST
from bridge.base.tensor_properties import span_of
from bridge.capture import Draw
from bridge.compile import gpu_of

__all__ = ["NATIVE_DROPOUT", "FusedDropout", "FusedSteps"]

NATIVE_DROPOUT = "aten.native_dropout.default"

_ALIGNED = 16
"""Bytes that a thread reads at once at most; torch's allocator gives multiples of more."""


class FusedDropout:
    """The mask of one dropout.

    Args:
        draw: of :data:`NATIVE_DROPOUT`.
    """

    def __init__(self, draw: Draw):
        self._draw, self._operand = draw, draw.operand
        self._rate = draw.args[0]
        self._span = span_of(draw.shape, self._operand.stride)
        self._count = torch.Size(draw.shape).numel()

    def draw(self, generator: torch.Generator | None, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The mask, from the device's default generator.

        Args:
            generator: another one is moved on as far, and the mask is not drawn: the operator takes none.
            inputs: module tensors and arguments: the dropout may read in the memory of one.
        """
        if generator is not None:
            self._move(generator)
            return []
        return [torch.native_dropout(self._like_operand(inputs), self._rate, True)[1]]

    def _move(self, generator: torch.Generator) -> None:
        draw = self._draw
        if draw.device == HOST:
            torch.empty(draw.shape, dtype=torch.bool).bernoulli_(1 - self._rate, generator=generator)
        else:
            generator.set_offset(generator.get_offset() + gpu_of(draw.device).advance(self._count))

    def _like_operand(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        operand, draw = self._operand, self._draw
        address = operand.offset + (0 if operand.of is None else inputs[operand.of].data_ptr())
        first, beside = divmod(address % _ALIGNED, operand.dtype.itemsize)
        if beside:
            raise RuntimeError(f"a dropout's tensor lies at {address}, which is no address of {operand.dtype}")
        memory = torch.empty(first + self._span, dtype=operand.dtype, device=draw.device)
        return memory.as_strided(draw.shape, operand.stride, first)


class FusedSteps:
    """The masks of a loop's steps, which are one draw: a row for each step.

    Args:
        draw: whose steps have dropouts.
    """

    def __init__(self, draw: Draw):
        self._shape = draw.shape
        self._dropouts = [FusedDropout(each) for each in draw.steps.dropouts]

    def draw(self, generator: torch.Generator | None, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """As :meth:`FusedDropout.draw`, one after the other."""
        masks = [mask.reshape(-1) for each in self._dropouts for mask in each.draw(generator, inputs)]
        return [torch.cat(masks).reshape(self._shape)] if masks else []
