"""Convolutions, pools and interpolations → library functions, in the memory order that eager's kernels choose.

channels_last: the strides of eager's tensor decide whether a library function returns channels as the last axis; a
permutation restores the axis order. ``autodiff.sink_channel_permutes`` sinks these permutations below the operators
that follow.

Recurrent layers on a GPU → cuDNN's kernels for all layers and directions at once, where loops take longer.
A loop launches a product and a kernel for each step of each layer, one after the other; cuDNN runs layers and
directions concurrently.

Windows, folded windows and mirrored pads → slices, whose gradients are sums of slices.
torch's formulas of these operators are gathers at computed positions: their gradients would add number by number at
positions that repeat, in no order on a GPU. As slices, the gradient of each number is a sum of the few that it went to.
One axis after the other: windows of ``k`` positions along each of two axes are ``2 k`` slices instead of ``k * k``.
"""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from tvm import relax

from autodiff.extents import Dim, maximum, same
from autodiff.gradients.registry import padded
from autodiff.ir import Expr, dtype, shape
from bridge.aten.any_operator import computed_from
from bridge.aten.reductions import is_rounded_once, reduce
from bridge.aten.registry import UnsupportedUse, converts, dims, numbers_only, rounds_once
from bridge.aten.shape import sliced
from bridge.base.devices import current_device
from bridge.base.torch_cuda import read_settings, recurrent_layers_are_tf32, settings_of_layers
from bridge.base.torch_internals import aten, unset_fake_temporarily
from bridge.capture import UPSAMPLES, TensorMetadata

op = relax.op

_TO_BACK, _TO_FRONT = (0, 2, 3, 1), (0, 3, 1, 2)
"""Axis orders: channels from the second place to the last, and back."""


def is_channels_last(form: Any) -> bool:
    """Whether eager's tensor is contiguous in torch's channels_last and in no other format."""
    if not isinstance(form, torch.Tensor) or form.ndim != 4 or not all(type(size) is int for size in form.shape):
        return False
    return form.is_contiguous(memory_format=torch.channels_last) and not form.is_contiguous()


def lies_behind(node: fx.Node) -> bool:
    """Whether a value is computed in channels_last: eager's tensor has that layout, or is computed point-wise, by group
    norm or by a copy from one that has it. The compiled call makes no copy there."""
    return computed_from(node, lambda each: is_channels_last(each.meta.get("val")), _alike)


def _alike(node: fx.Node) -> list[fx.Node]:
    """The operands whose memory order an operator keeps."""
    if node.target is operator.getitem and node.args[0].target is aten.native_group_norm.default:
        return [node.args[0].args[0]] if node.args[1] == 0 else []
    if node.target is not aten.clone.default and torch.Tag.pointwise not in getattr(node.target, "tags", ()):
        return []
    extents = node.meta["val"].shape
    return [each for each in node.all_input_nodes if getattr(each.meta.get("val"), "shape", None) == extents]


def library_of_images(importer, name: str, args: Sequence[Any], form: Any) -> Expr | tuple[Expr, ...]:
    """A library call with the given result metadata; calls the ``_last`` function where eager's is channels_last."""
    several = isinstance(form, tuple | list)
    forms = tuple(form) if several else (form,)
    goes_last = is_channels_last(forms[0])
    if goes_last:
        name = f"{name}_last"
        forms = tuple(TensorMetadata(tuple(each.shape[axis] for axis in _TO_BACK), each.dtype) for each in forms)
    made = importer.library(name, args, forms if several else forms[0])
    items = tuple(importer.item(made, index) for index in range(len(forms))) if several else (made,)
    if goes_last:
        items = tuple(importer.emit(op.permute_dims(item, _TO_FRONT)) for item in items)
    return items if several else items[0]


def read_from_behind(importer, x: Expr) -> Expr:
    """``x`` as a permutation of a tensor with channels last."""
    return importer.emit(op.permute_dims(importer.emit(op.permute_dims(x, _TO_BACK)), _TO_FRONT))


def _per_axis(value, rank: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * rank if len(values) == 1 else values


def _cast_behind(importer, weight):
    """The cast of a weight, made after a permutation to channels_last: the stored cast then has the layout that the
    convolution reads, forward and backward."""
    cast = next((value for var, value in reversed(importer.bindings) if var.same_as(weight)), None)
    if shape(weight)[2:] == (1, 1) or not isinstance(cast, relax.Call) or cast.op.name != "relax.astype":
        return weight
    behind = importer.cast(importer.emit(op.permute_dims(cast.args[0], [0, 2, 3, 1])), dtype(weight))
    return importer.emit(op.permute_dims(behind, [0, 3, 1, 2]))


@converts(aten.convolution.default)
def convolution(importer, node, x, weight, bias, stride, padding, dilation, transposed, output_padding, groups):
    if "float" not in dtype(x):
        raise UnsupportedUse(f"a convolution of {dtype(x)}")
    rank = len(shape(weight)) - 2
    geometry = [_per_axis(value, rank) for value in (stride, padding, dilation, output_padding)]
    out = importer.out(node)
    weight = _cast_behind(importer, weight) if is_channels_last(out) else weight
    inside = [bias] if bias is not None and is_rounded_once(x) else []
    y = library_of_images(importer, "convolution", [x, weight, *geometry, bool(transposed), groups, *inside], out)
    if bias is None or inside:
        return y
    return importer.emit(op.add(y, importer.reshape(bias, (shape(bias)[0], *[1] * rank))))


@converts(aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default)
def max_pool(importer, node, x, kernel, stride=(), padding=0, dilation=1, ceil_mode=False):
    rank = 2 if node.target is aten.max_pool2d_with_indices.default else 3
    kernel = _per_axis(kernel, rank)
    geometry = [kernel, _per_axis(stride, rank) if stride else kernel]
    geometry += [_per_axis(padding, rank), _per_axis(dilation, rank)]
    return library_of_images(importer, "max_pool", [x, *geometry, bool(ceil_mode)], node.meta["val"])


@converts(aten.avg_pool1d.default, aten.avg_pool2d.default, aten.avg_pool3d.default)
def avg_pool(importer, node, x, kernel, stride=(), padding=0, ceil_mode=False, include_pad=True, divisor=None):
    rank = {aten.avg_pool1d.default: 1, aten.avg_pool2d.default: 2, aten.avg_pool3d.default: 3}[node.target]
    kernel = _per_axis(kernel, rank)
    stride = _per_axis(stride, rank) if stride else kernel
    padding = _per_axis(padding, rank)
    target = importer.out(node)
    if rank == 1:  # torch has no backward kernel for one axis
        x = importer.reshape(x, (*shape(x)[:-1], 1, shape(x)[-1]))
        kernel, stride, padding = [1, *kernel], [1, *stride], [0, *padding]
        target = target.unsqueeze(-2)
    args = [x, kernel, stride, padding, bool(ceil_mode), bool(include_pad), divisor or 0]
    return importer.reshape(library_of_images(importer, "avg_pool", args, target), importer.out(node).shape)


@converts(aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool3d.default)
def adaptive_avg_pool(importer, node, x, output_size):
    return library_of_images(importer, "adaptive_avg_pool", [x, list(output_size)], importer.out(node))


@converts(aten.adaptive_avg_pool1d.default)
def adaptive_avg_pool1d(importer, node, x, output_size):
    if list(output_size) == [1]:  # torch takes the mean
        return reduce(importer, op.mean, x, [-1], True)
    x = importer.reshape(x, (*shape(x)[:-1], 1, shape(x)[-1]))
    target = importer.out(node).unsqueeze(-2)
    y = importer.library("adaptive_avg_pool", [x, [1, *output_size]], target)
    return importer.reshape(y, importer.out(node).shape)


@converts(aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default)
def adaptive_max_pool(importer, node, x, output_size):
    pair = importer.library("adaptive_max_pool", [x, list(output_size)], node.meta["val"])
    return importer.item(pair, 0), importer.item(pair, 1)


CUDNN_TYPES = ("float16", "float32", "float64")
"""Element types of layers that eager runs by cuDNN."""

_NARROW, _NARROW_RNN = 128, 256
"""Elements of a state up to which cuDNN keeps a float32 weight on the chip, and is always quicker."""

_MANY_ROWS, _MANY_ELEMENTS = 64, 1 << 15
"""Rows, and elements of a state of all rows, up to which a loop's products, over slices of the weight, are quicker than
cuDNN's in TF32."""

_FEW_ROWS = 16
"""Rows up to which a loop is quicker with several layers or directions, which cuDNN runs concurrently."""


def cudnn_is_quicker(cell: str, x: Expr, states: Sequence[Expr]) -> bool:
    """Whether cuDNN's kernels take less time than loops, both as recorded graphs; by measurements on an H200.

    Args:
        cell: the name of torch's operator, as in ``"gru"``.
        x: [steps, batch, inputs].
        states: [layers * directions, batch, hidden] each.
    """
    cells, batch, size = shape(states[0])
    if dtype(x) != "float32":
        return dtype(x) == "float16" and batch <= _MANY_ROWS
    if size <= (_NARROW_RNN if cell.startswith("rnn") else _NARROW):
        return True
    many = batch > _MANY_ROWS or batch * size > _MANY_ELEMENTS or (cells > 1 and batch > _FEW_ROWS)
    return many and recurrent_layers_are_tf32()


def cudnn_layers(
    importer: Any,
    cell: str,
    x: Expr,
    states: Sequence[Expr],
    weights: Sequence[Expr],
    biases: bool,
    layers: int,
    both_ways: bool,
) -> list[Expr]:
    """Outputs [steps, batch, directions * hidden] and the last states [layers * directions, batch, hidden]."""
    options = json.dumps({"cell": cell, "layers": layers, "both_ways": both_ways, "biases": biases}, sort_keys=True)
    rows, batch, size = shape(states[0])
    extents = tuple(tuple(shape(each)) for each in (x, *weights, *states))
    kind = getattr(torch, dtype(x))
    workspace = _workspace(options, extents, kind, current_device(), str(read_settings()))
    results = [
        TensorMetadata((*shape(x)[:2], size * (2 if both_ways else 1)), kind),
        *(TensorMetadata((rows, batch, size), kind) for _ in states),
        TensorMetadata((workspace,), torch.uint8),
    ]
    made = importer.library("recurrent_layers", [options, len(states), x, *weights, *states], results)
    return [importer.item(made, index) for index in range(1 + len(states))]


@functools.lru_cache(maxsize=64)
def _workspace(
    options: str, extents: tuple[tuple[int, ...], ...], kind: torch.dtype, device: torch.device, settings: str
) -> int:
    """Bytes of cuDNN's workspace, by a trial call; 0 on another device.

    Args:
        settings: the global settings by which cuDNN chooses kernels; part of the cache's key.
    """
    if device.type != "cuda":
        return 0
    read = json.loads(options)
    count, of_layer = 2 if read["cell"] == "lstm" else 1, 4 if read["biases"] else 2
    layers, both_ways = read["layers"], read["both_ways"]
    with torch.no_grad(), unset_fake_temporarily():
        x, *rest = (torch.zeros(each, dtype=kind, device=device) for each in extents)
        weights, (h, *c) = rest[:-count], rest[-count:]
        mode, size, *_ = told = settings_of_layers(read["cell"], h.shape[2], layers, both_ways)
        buffer = aten._cudnn_rnn_flatten_weight(weights, of_layer, x.shape[2], mode, size, 0, layers, False, both_ways)
        made = aten._cudnn_rnn(x, weights, of_layer, buffer, h, c[0] if c else None, *told)
    return made[3].numel()


@converts(*(packet.vec for packet in UPSAMPLES))
def upsample_vec(importer, node, x, output_size, *rest):
    """``rest``: align_corners (not for nearest modes), then the scale factors or ``None``."""
    *corners, factors = rest
    extents = importer.out(node).shape[2:]
    return _upsample(importer, node, x, extents, *corners, *(factors or [None] * len(extents)))


@converts(*(packet.default for packet in UPSAMPLES))
def upsample(importer, node, x, output_size, *rest):
    return _upsample(importer, node, x, output_size, *rest)


def _upsample(importer, node, x, extents, *rest):
    mode = UPSAMPLES[node.target.overloadpacket]
    aligned, scales = (False, rest) if mode.startswith("nearest") else (rest[0], rest[1:])
    scales = [float(scale or 0) for scale in (*scales, *[None] * (len(extents) - len(scales)))]
    args = [x, mode, dims(extents), bool(aligned), *scales]
    return library_of_images(importer, "upsample", args, importer.out(node))


def _pieces(size: int, step: int, dilation: int) -> list[tuple[int, int, int]]:
    """A window cut into pieces; one piece of all windows can be sliced without overlap.

    Returns:
        for each piece its first position inside the window, the position after its last, and the offset of its begin
        from the begin of the window in the tensor.
    """
    if dilation > 1:
        return [(place, place + 1, place * dilation) for place in range(size)]
    return [(first, min(first + step, size), first) for first in range(0, size, step)]


def _changed(x: Expr, dim: int, *extents: Dim) -> tuple[Dim, ...]:
    """The shape of ``x`` with the extent of an axis replaced by others."""
    return (*shape(x)[:dim], *extents, *shape(x)[dim + 1 :])


def _pad(importer, x: Expr, dim: int, before: Dim, after: Dim) -> Expr:
    """``x`` between zeros."""
    return x if same(before, 0) and same(after, 0) else importer.emit(padded(x, dim, before, after, importer.emit))


def _joined(importer, parts: Sequence[Expr], dim: int) -> Expr:
    return parts[0] if len(parts) == 1 else importer.emit(op.concat(list(parts), dim))


def _windows(importer, x: Expr, dim: int, count: Dim, size: int, step: int, dilation: int = 1) -> Expr:
    """``x`` with an axis replaced by two: the windows, and the positions inside each."""
    parts = []
    for first, last, begin in _pieces(size, step, dilation):
        width = last - first
        end = begin + (count - 1) * step + width
        if width == 1:
            rows = sliced(importer, x, dim, begin, end, step)
            parts.append(importer.reshape(rows, _changed(x, dim, count, 1)))
        else:
            rows = _pad(importer, sliced(importer, x, dim, begin, end), dim, 0, step - width)
            rows = importer.reshape(rows, _changed(x, dim, count, step))
            parts.append(sliced(importer, rows, dim + 1, 0, width))
    return _joined(importer, parts, dim + 1)


def _folded(importer, x: Expr, dim: int, extent: Dim, step: int, dilation: int) -> Expr:
    """Windows, along axes ``dim`` (windows) and ``dim + 1`` (positions inside) → their sum, each at its origin."""
    count, size = shape(x)[dim], shape(x)[dim + 1]
    total = None
    for first, last, begin in _pieces(size, step, dilation):
        rows = _pad(importer, sliced(importer, x, dim + 1, first, last), dim + 1, 0, step - (last - first))
        line = importer.reshape(rows, (*shape(x)[:dim], count * step, *shape(x)[dim + 2 :]))
        length = (count - 1) * step + last - first
        line = _pad(importer, sliced(importer, line, dim, 0, length), dim, begin, extent - begin - length)
        total = line if total is None else importer.emit(op.add(total, line))
    return total


@converts(aten.im2col.default)
@rounds_once
def im2col(importer, node, x, kernel, dilation, padding, stride):
    numbers_only("windows", kernel, dilation, padding, stride)
    rank = len(shape(x))
    for axis, dim in ((0, rank - 2), (1, rank)):  # after the windows along the first axis
        x = _pad(importer, x, dim, padding[axis], padding[axis])
        count = _count(shape(x)[dim], kernel[axis], stride[axis], dilation[axis])
        x = _windows(importer, x, dim, count, kernel[axis], stride[axis], dilation[axis])
    *others, rows, in_row, columns, in_column = range(rank + 2)
    x = importer.emit(op.permute_dims(x, [*others, in_row, in_column, rows, columns]))
    return importer.reshape(x, importer.out(node).shape)


def _count(extent: Dim, size: int, step: int, dilation: int) -> Dim:
    return (extent - dilation * (size - 1) - 1) // step + 1


@converts(aten.col2im.default)
@rounds_once
def col2im(importer, node, x, output_size, kernel, dilation, padding, stride):
    numbers_only("windows", kernel, dilation, padding, stride)
    *others, channels, height, width = importer.out(node).shape
    extents = [extent + 2 * pad for extent, pad in zip((height, width), padding, strict=True)]
    counts = [_count(*each) for each in zip(extents, kernel, stride, dilation, strict=True)]
    x = importer.reshape(x, (*others, channels, *kernel, *counts))
    *others, in_row, in_column, rows, columns = range(len(shape(x)))
    x = importer.emit(op.permute_dims(x, [*others, rows, in_row, columns, in_column]))
    for axis, dim in ((1, len(others) + 2), (0, len(others))):
        x = _folded(importer, x, dim, extents[axis], stride[axis], dilation[axis])
        x = sliced(importer, x, dim, padding[axis], extents[axis] - padding[axis])
    return x


@converts(aten.unfold.default)
def unfold(importer, node, x, dim, size, step):
    numbers_only("windows", size, step)
    if not shape(x) or size == 0:
        return importer.reshape(sliced(importer, x, 0, 0, size) if shape(x) else x, importer.out(node).shape)
    dim %= len(shape(x))
    x = _windows(importer, x, dim, _count(shape(x)[dim], size, step, 1), size, step)
    order = [axis for axis in range(len(shape(x))) if axis != dim + 1]
    return x if order[-1] == dim else importer.emit(op.permute_dims(x, [*order, dim + 1]))


@converts(aten.reflection_pad1d.default, aten.reflection_pad2d.default, aten.reflection_pad3d.default)
def reflection_pad(importer, node, x, widths):
    def reflected(x, dim, begin, end):
        return importer.emit(op.flip(sliced(importer, x, dim, begin, end), dim))

    for dim, before, after in _by_axis(x, widths):
        extent = shape(x)[dim]
        left = [reflected(x, dim, 1, before + 1)] if before > 0 else []
        right = [reflected(x, dim, extent - 1 - after, extent - 1)] if after > 0 else []
        x = _between(importer, x, dim, before, after, left, right)
    return x


@converts(aten.replication_pad1d.default, aten.replication_pad2d.default, aten.replication_pad3d.default)
def replication_pad(importer, node, x, widths):
    def repeated(x, dim, place, width):
        row = sliced(importer, x, dim, place, place + 1)
        return importer.expand(row, _changed(x, dim, width))

    for dim, before, after in _by_axis(x, widths):
        left = [repeated(x, dim, 0, before)] if before > 0 else []
        right = [repeated(x, dim, shape(x)[dim] - 1, after)] if after > 0 else []
        x = _between(importer, x, dim, before, after, left, right)
    return x


def _by_axis(x: Expr, widths: Sequence[Dim]) -> list[tuple[int, Dim, Dim]]:
    """Axes with the widths before and after them: torch lists the last axis first."""
    last = len(shape(x)) - 1
    return [(last - pair, *widths[2 * pair : 2 * pair + 2]) for pair in range(len(widths) // 2)]


def _between(importer, x: Expr, dim: int, before: Dim, after: Dim, left: list[Expr], right: list[Expr]) -> Expr:
    """``x`` between the given tensors; a negative width cuts."""
    x = _joined(importer, [*left, x, *right], dim)
    return sliced(importer, x, dim, maximum(-before, 0), shape(x)[dim] - maximum(-after, 0))
