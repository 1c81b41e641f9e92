"""Masks of a GPU's dropout: observed dropouts → masks by eager's own kernels, or rules for computing them in kernels.

Fused dropout (``native_dropout``): eager's own kernel takes a tensor whose dtype, strides and 16-byte alignment decide
which element gets which number. It runs on a tensor of eager's layout, with arbitrary values; the mask and the
generator's advance are eager's.

Dropout inside efficient attention: the kernel does not return its mask, but it can be read off. With equal scores and
an identity matrix as values, an element of the result is nonzero if the weight of that key was kept. Where kernels
compute masks, only the check of the rule needs it.

Recomputed masks: observed dropouts of a GPU → eager's rule, where it is known to the bit: for dense tensors of the
usual dtypes, on a checked GPU, in memory of the call's own, or in an input that begins at an aligned address, which is
then a condition of the entry (:func:`alignment_of`). torch draws every other mask before the program runs, and it is
stored.

Check: masks by the kernels of this package and by eager, bit for bit, once per device and process. The numbers of
eager's dropout follow no documented rule: they depend on the kernel, the GPU's size and the width of loads. On a GPU,
or with a torch, that draws differently, torch draws the masks.
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
from bridge.base.torch_internals import VF, aten
from bridge.capture import Draw
from bridge.compile import IN_A_ROW, Compilation, CompileOptions, DrawnMask, Gpu, backend_for, gpu_of

__all__ = ["NATIVE_DROPOUT", "AttentionMask", "FusedDropout", "FusedSteps", "alignment_of", "begin_check"]
__all__ += ["checked_gpu", "mask_at", "mask_of_attention", "recomputed_mask"]

NATIVE_DROPOUT = "aten.native_dropout.default"

_ALIGNED = 16
"""The most bytes that a thread reads at once; torch's allocator aligns to multiples of it."""


class FusedDropout:
    """The mask of one dropout, a draw of :data:`NATIVE_DROPOUT`."""

    def __init__(self, draw: Draw):
        self._draw, self._operand = draw, draw.operand
        self._rate = draw.args[0]
        self._span = span_of(draw.shape, self._operand.stride)
        self._count = torch.Size(draw.shape).numel()

    def draw(self, generator: torch.Generator | None, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The mask, from the device's default generator; ``inputs``: the dropout may read the memory of one.

        ``generator``: if given, only advances this generator, since the operator takes none.
        """
        if generator is not None:
            self._move(generator)
            return []
        return [VF.native_dropout(self._like_operand(inputs), self._rate, True)[1]]

    def _move(self, generator: torch.Generator) -> None:
        draw = self._draw
        if draw.device == HOST:
            VF.empty(draw.shape, dtype=torch.bool).bernoulli_(1 - self._rate, generator=generator)
        else:
            generator.set_offset(generator.get_offset() + gpu_of(draw.device).advance(self._count))

    def _like_operand(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        operand, draw = self._operand, self._draw
        address = operand.offset + (0 if operand.of is None else inputs[operand.of].data_ptr())
        first, beside = divmod(address % _ALIGNED, operand.dtype.itemsize)
        if beside:
            raise RuntimeError(f"a dropout's tensor lies at {address}, which is no address of {operand.dtype}")
        memory = VF.empty(first + self._span, dtype=operand.dtype, device=draw.device)
        return memory.as_strided(draw.shape, operand.stride, first)


class FusedSteps:
    """The masks of a loop's steps as one draw (with ``steps``): a row for each step."""

    def __init__(self, draw: Draw):
        self._shape = draw.shape
        self._dropouts = [FusedDropout(each) for each in draw.steps.dropouts]

    def draw(self, generator: torch.Generator | None, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See :meth:`FusedDropout.draw`; the steps' masks in order."""
        masks = [mask.reshape(-1) for each in self._dropouts for mask in each.draw(generator, inputs)]
        return [VF.cat(masks).reshape(self._shape)] if masks else []


_UNIT = 8
"""Alignment of rows in elements: 16 bytes or more of any dtype."""


def mask_of_attention(shape: Sequence[int], rate: float, device: torch.device) -> torch.Tensor:
    """The efficient kernel's mask for weights of (batch, head, row, column); advances the default generator."""
    batch, heads, rows, columns = shape
    query, key = (VF.zeros(batch, heads, each, _UNIT, device=device) for each in (rows, columns))
    value = VF.eye(columns, -(-columns // _UNIT) * _UNIT, device=device).expand(batch, heads, -1, -1)
    kernel = aten._scaled_dot_product_efficient_attention
    return kernel(query, key, value, None, False, rate, False, scale=1.0)[0][..., :columns] > 0


class AttentionMask:
    """The mask of one attention's weights (a draw with ``is_attention_mask``), in memory."""

    def __init__(self, draw: Draw):
        self._draw = draw

    def draw(self, generator: torch.Generator | None, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See :meth:`FusedDropout.draw`."""
        draw = self._draw
        if generator is not None:
            generator.set_offset(generator.get_offset() + draw.advance)
            return []
        with torch.no_grad():
            return [mask_of_attention(draw.shape, draw.args[0], draw.device).contiguous()]


_TYPES = (torch.float32, torch.float16, torch.bfloat16)
_WIDEST = 16
"""The most bytes that a thread of eager's kernel loads at once."""


def recomputed_mask(draw: Draw, gpu: Callable[[], Gpu | None]) -> DrawnMask | None:
    """Eager's rule for a mask, by which a kernel computes it; ``None``: the mask is to be stored.

    A rule for an input's memory holds at addresses that are multiples of :func:`alignment_of` it. ``gpu`` gives the
    GPU's size, or ``None`` where it does not draw as expected.
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
    """The address alignment, in bytes, that decides the load width of eager's kernel."""
    size = draw.operand.dtype.itemsize
    return (_width(_count(draw), 0, size) or _WIDEST // size) * size


def mask_at(draw: Draw, state: torch.Tensor) -> torch.Tensor:
    """A recomputed dropout mask, drawn by torch from the generator's state before the draw. Restores the generator."""
    if not draw.is_attention_mask and draw.operand.of is not None:
        draw = replace(draw, operand=replace(draw.operand, of=None))  # aligned as memory of the call's own
    make = AttentionMask(draw) if draw.is_attention_mask else FusedDropout(draw)
    with at_state(default_generator(draw.device), *state.tolist()):
        (mask,) = make.draw(None, ())
    return mask


def _count(draw: Draw) -> Dim:
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
    """The load width of a thread for elements of ``size`` bytes; ``None`` if it depends on dynamic sizes."""
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
"""(dtype, load width in elements, first element of the tensor in its memory)."""
_ATTENTIONS = ((2, 3, 37, 45), (1, 2, 130, 200))
"""Shapes of attention weights: whole and partial blocks of its kernel; rows at each position in a group of four."""

_BEGUN: dict[torch.device, Compilation | None] = {}
"""The check's program during its compilation; ``None`` after the check."""


def begin_check(device: torch.device) -> None:
    """Begins to compile the program of :func:`checked_gpu` in the background, unless begun: it is needed soon."""
    if device not in _BEGUN:
        _BEGUN[device] = begun = _compilation(device)
        begun.finish()


@functools.cache
def checked_gpu(device: torch.device) -> Gpu | None:
    """A GPU's size if it draws its masks as kernels compute them; otherwise logs a warning and returns ``None``."""
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
    """Compares masks and the generator's offset, over several launches of several rounds, from a 64-bit seed."""
    counts = [_numbers(gpu, width, place) for place, (_, width, _) in enumerate(_CASES)]
    states, masks = [], []
    generator = default_generator(device)
    with on_side_states(generator, _side(device)), torch.no_grad():
        for (dtype, _, first), count in zip(_CASES, counts, strict=True):
            offset = generator.get_offset()
            states.append((_SEED, offset))
            dropped = VF.empty(count + first, dtype=dtype, device=device)[first:]
            masks.append(VF.native_dropout(dropped, _RATE, True)[1])
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
    given = VF.tensor(states, dtype=torch.uint64)
    made = [mask.logical_not() for mask in program(list(given.unbind()))]
    compilation.keep()
    return all(map(VF.equal, made, masks))


def _side(device: torch.device) -> torch.Generator:
    side = torch.Generator(device).manual_seed(_SEED)
    side.set_offset(2**34 - 4)  # calls are counted in more than 32 bits
    return side


def _numbers(gpu: Gpu, width: int, place: int) -> int:
    """A number of elements that a thread loads in exactly this width: two rounds of all threads, or a part of one."""
    rounds = 2 * gpu.most_threads * max(width, 4) if place % 2 else 1000 * width
    return rounds + (width if width < 8 else 0)


def _compilation(device: torch.device) -> Compilation:
    """The program: states → masks of all cases, as kernels compute them."""
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
