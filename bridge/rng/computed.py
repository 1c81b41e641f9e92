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
(:mod:`bridge.rng.computed`): in memory of the call's own, and in an input's that begins where torch's allocator
would have it begin, which is then a condition of the entry (:func:`alignment_of`). Every other mask is drawn by torch
before the program runs, and stored.

Check of a GPU's masks: masks by the kernels of this package and by eager, bit for bit, once per device and process.

Which numbers eager's dropout takes is no documented rule of torch's: it depends on the kernel, the GPU's size and how
elements are loaded. A GPU, or a torch, that draws otherwise has its masks drawn by torch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from tvm import relax

from autodiff.extents import Dim, divides, same
from bridge.base.devices import HOST
from bridge.base.generators import at_state, default_generator, on_side_states
from bridge.base.log import channel
from bridge.base.tensor_properties import span_of
from bridge.base.torch_internals import aten
from bridge.capture import Draw
from bridge.compile import IN_A_ROW, Compilation, CompileOptions, DrawnMask, Gpu, backend_for, gpu_of

__all__ = ["NATIVE_DROPOUT", "AttentionMask", "FusedDropout", "FusedSteps", "alignment_of", "begin_check"]
__all__ += ["checked_gpu", "computed_mask", "mask_at", "mask_of_attention"]

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


log = channel("philox")

_SEED = 0x9E3779B97F4A7C15
_RATE = 0.3
_CASES = (
    (torch.float32, 4, 0),
    (torch.float16, 8, 0),
    (torch.bfloat16, 8, 0),
    (torch.float32, 2, 0),
    (torch.bfloat16, 1, 0),
    (torch.float32, 2, 2),
    (torch.float16, 4, 4),
)
"""Type, elements that a thread loads at once, first element of the tensor in its memory."""
_ATTENTIONS = ((2, 3, 37, 45), (1, 2, 130, 200))
"""Weights of attention: whole blocks of its kernel and parts of them; rows that begin anywhere in a call's four."""

_BEGUN: dict[torch.device, Compilation | None] = {}
"""The check's program on its way; ``None`` behind the check."""


def begin_check(device: torch.device) -> None:
    """Begins to compile what :func:`checked_gpu` runs, in the background, if nobody has: it will be asked soon."""
    if device not in _BEGUN:
        _BEGUN[device] = begun = _compilation(device)
        begun.finish()


@functools.cache
def checked_gpu(device: torch.device) -> Gpu | None:
    """A GPU's size if it draws its masks as kernels compute them; ``None`` if not, which is logged."""
    gpu = gpu_of(device)
    if _draws_alike(device, gpu):
        return gpu
    log.warning(
        "torch %s draws dropout masks by a rule of its own on %s; masks are left to it and stored",
        torch.__version__,
        torch.cuda.get_device_name(device),
    )
    return None


def _draws_alike(device: torch.device, gpu: Gpu) -> bool:
    """Masks and the generator's offset, over several launches of several rounds, from a seed of 64 bits."""
    counts = [_numbers(gpu, width, place) for place, (_, width, _) in enumerate(_CASES)]
    states, masks = [], []
    generator = default_generator(device)
    with on_side_states(generator, _side(device)), torch.no_grad():
        for (dtype, _, first), count in zip(_CASES, counts, strict=True):
            offset = generator.get_offset()
            states.append((_SEED, offset))
            dropped = torch.empty(count + first, dtype=dtype, device=device)[first:]
            masks.append(torch.native_dropout(dropped, _RATE, True)[1])
            if generator.get_offset() != offset + gpu.advance(count):
                return False
        for shape in _ATTENTIONS:
            offset = generator.get_offset()
            states.append((_SEED, offset))
            masks.append(mask_of_attention(shape, _RATE, device).flatten())
            if generator.get_offset() != offset + -(-math.prod(shape) // 4) * 4:
                return False
    compilation = _BEGUN.get(device) or _compilation(device)
    program = compilation.finish()
    _BEGUN[device] = None
    given = torch.tensor(states, dtype=torch.uint64)
    made = [mask.logical_not() for mask in program(list(given.unbind()))]
    compilation.keep()
    return all(map(torch.equal, made, masks))


def _side(device: torch.device) -> torch.Generator:
    side = torch.Generator(device).manual_seed(_SEED)
    side.set_offset(2**34 - 4)  # calls are counted beyond 32 bits
    return side


def _numbers(gpu: Gpu, width: int, place: int) -> int:
    """Elements of which a thread loads ``width`` at once, and no more: two rounds of all threads, or a part of one."""
    rounds = 2 * gpu.most_threads * max(width, 4) if place % 2 else 1000 * width
    return rounds + (width if width < 8 else 0)


def _compilation(device: torch.device) -> Compilation:
    """States → masks of all cases, as kernels compute them."""
    gpu = gpu_of(device)
    widths = [width for _, width, _ in _CASES] + [IN_A_ROW] * len(_ATTENTIONS)
    counts = [_numbers(gpu, width, place) for place, (_, width, _) in enumerate(_CASES)]
    counts += map(math.prod, _ATTENTIONS)
    params = [relax.Var(f"mask_{place}", relax.TensorType((count,), "bool")) for place, count in enumerate(counts)]
    builder = relax.BlockBuilder()
    with builder.function("masks", params):
        with builder.dataflow():
            results = [builder.emit_output(relax.op.logical_not(param)) for param in params]
        builder.emit_func_output(relax.Tuple(results))
    drawn = {
        place: DrawnMask(_RATE, width, gpu.launched(count))
        for place, (width, count) in enumerate(zip(widths, counts, strict=True))
    }
    options = CompileOptions.current(backend_for(device))
    return Compilation(builder.get()["masks"], "masks", options, drawn)
