"""Masks of a GPU's dropout: observed dropouts → masks by eager's own kernels, or which of them kernels compute.

Masks of fused dropout by torch: an observed ``native_dropout``, a GPU's dropout → its mask, by eager's own kernel.
The kernel takes a tensor, whose type, strides and 16-byte alignment decide which element gets which number. So it is
run on one of eager's layout, with whatever numbers; the mask, and what it adds to the generator's offset, are eager's.

Masks of attention's weights by torch: an observed dropout inside of the efficient kernel → what it drops.
The kernel keeps its mask to itself, and gives it away where each key's value is a row of its own: with equal scores, a
result's element says whether the weight of that key was kept. So the mask and what it adds to the generator's offset
are eager's own. Where kernels compute masks (:mod:`bridge.rng.computed`), only the check of the rule asks for it.

Which masks kernels compute: observed dropouts of a GPU → how eager draws each, where that is known to the bit.
It is known for dense tensors of the usual types, on a GPU that draws as the formula says
(:mod:`bridge.rng.check_philox`): in memory of the call's own, and in an input's that begins where torch's allocator
would have it begin, which is then a condition of the entry (:func:`alignment_of`). Every other mask is drawn by torch
before the program runs, and stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from autodiff.extents import Dim, divides, same
from bridge.base.devices import HOST
from bridge.base.generators import at_state, default_generator
from bridge.base.tensor_properties import span_of
from bridge.base.torch_internals import aten
from bridge.capture import Draw
from bridge.compile import IN_A_ROW, DrawnMask, Gpu, gpu_of

__all__ = [
    "NATIVE_DROPOUT",
    "AttentionMask",
    "FusedDropout",
    "FusedSteps",
    "alignment_of",
    "computed_mask",
    "mask_at",
    "mask_of_attention",
]


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


_TYPES = (torch.float32, torch.float16, torch.bfloat16)
_WIDEST = 16
"""Bytes that a thread of eager's kernel loads at once, at most."""


def computed_mask(draw: Draw, gpu: Callable[[], Gpu | None]) -> DrawnMask | None:
    """How eager draws a mask; ``None``: it is to be stored.

    Where it reads an input's memory, that holds for memory that begins at a multiple of :func:`alignment_of` it.

    Args:
        gpu: the size of the GPU, asked for last; ``None`` where it does not draw as expected.
    """
    if draw.device.type != "cuda" or draw.is_computed:
        return None
    if draw.is_attention_mask:
        return DrawnMask(draw.args[0], IN_A_ROW, 1) if _count(draw) < 2**31 and gpu() is not None else None
    operand = draw.operand
    if draw.op != NATIVE_DROPOUT:
        return None
    if operand.dtype not in _TYPES or not _is_dense(draw.shape, operand.stride):
        return None
    count = _count(draw)
    width = _width(count, operand.offset, operand.dtype.itemsize)
    if width is None or count >= 2**31 or (size := gpu()) is None:
        return None
    return DrawnMask(draw.args[0], width, size.launched(count))


def alignment_of(draw: Draw) -> int:
    """Bytes: how many elements a thread of eager's kernel loads at once changes with addresses below these alone."""
    size = draw.operand.dtype.itemsize
    return (_width(_count(draw), 0, size) or _WIDEST // size) * size


def mask_at(draw: Draw, state: torch.Tensor) -> torch.Tensor:
    """A mask that kernels compute, by torch, from the generator's state before the draw. The generator is not moved."""
    if not draw.is_attention_mask and draw.operand.of is not None:
        draw = replace(draw, operand=replace(draw.operand, of=None))  # it begins where memory of the call's own would
    make = AttentionMask(draw) if draw.is_attention_mask else FusedDropout(draw)
    with at_state(default_generator(draw.device), *state.tolist()):
        (mask,) = make.draw(None, ())
    return mask


def _count(draw: Draw) -> Dim:
    """Elements of a draw."""
    count: Dim = 1
    for extent in draw.shape:
        count = count * extent
    return count


def _is_dense(shape: Sequence[Dim], stride: Sequence[Dim]) -> bool:
    step: Dim = 1
    for extent, own in zip(reversed(shape), reversed(stride), strict=True):
        if not same(extent, 1) and not same(own, step):
            return False
        step = step * extent
    return True


def _width(count: Dim, offset: Dim, size: int) -> int | None:
    """How many elements of so many bytes a thread loads at once; ``None`` if that depends on sizes that vary."""
    width = _WIDEST // size
    while width > 1 and not (divides(width, count) and divides(width * size, offset)):
        if not isinstance(count, int) or not isinstance(offset, int):
            return None
        width //= 2
    return width
