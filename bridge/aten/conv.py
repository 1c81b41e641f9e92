"""Convolutions, pools and interpolations → library functions, in the order of memory that eager's kernels choose.

Images in channels_last: library functions that give theirs with channels as the last axis, and how those are shown.
What lies so is told from the strides that eager's tensor has. ``autodiff.channels_behind`` moves the permutations that
are made here behind what follows.

Recurrent layers on a GPU → cuDNN's kernels for all layers and directions at once, where loops take longer.
A loop launches a product and a kernel for each step of each layer, one after the other; cuDNN lets layers and
directions run side by side.
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

from autodiff.ir import Expr, dtype, shape
from bridge.aten.any_operator import computed_from
from bridge.aten.reductions import reduce
from bridge.aten.registry import UnsupportedUse, converts, dims
from bridge.base.devices import current_device
from bridge.base.torch_cuda import read_settings, recurrent_layers_are_tf32, settings_of_layers
from bridge.base.torch_internals import aten, unset_fake_temporarily
from bridge.capture import UPSAMPLES, TensorForm

__all__ = ["CUDNN_TYPES", "cudnn_is_quicker", "cudnn_layers", "is_channels_last", "library_of_images", "lies_behind"]
__all__ += ["read_from_behind"]

op = relax.op

_TO_BACK, _TO_FRONT = (0, 2, 3, 1), (0, 3, 1, 2)
"""Channels from the second place to the last, and back."""


def is_channels_last(form: Any) -> bool:
    """Whether eager's tensor has the strides of torch's channels_last and of nothing else."""
    if not isinstance(form, torch.Tensor) or form.ndim != 4 or not all(type(size) is int for size in form.shape):
        return False
    return form.is_contiguous(memory_format=torch.channels_last) and not form.is_contiguous()


def lies_behind(node: fx.Node) -> bool:
    """Whether a value is computed in channels_last: eager's lies so, or is made of such a one point by point, or in
    groups of channels, in another order that a copy gave it. Such copies are none in a compiled call."""
    return computed_from(node, lambda each: is_channels_last(each.meta.get("val")), _alike)


def _alike(node: fx.Node) -> list[fx.Node]:
    """The operands that a value is computed of in their own order of memory."""
    if node.target is operator.getitem and node.args[0].target is aten.native_group_norm.default:
        return [node.args[0].args[0]] if node.args[1] == 0 else []
    if node.target is not aten.clone.default and torch.Tag.pointwise not in getattr(node.target, "tags", ()):
        return []
    extents = node.meta["val"].shape
    return [each for each in node.all_input_nodes if getattr(each.meta.get("val"), "shape", None) == extents]


def library_of_images(importer, name: str, args: Sequence[Any], form: Any) -> Expr | tuple[Expr, ...]:
    """A library call whose result is (or results are) of that form: by the function named ``last`` where it lies so."""
    several = isinstance(form, tuple | list)
    forms = tuple(form) if several else (form,)
    goes_last = is_channels_last(forms[0])
    if goes_last:
        name = f"{name}_last"
        forms = tuple(TensorForm(tuple(each.shape[axis] for axis in _TO_BACK), each.dtype) for each in forms)
    made = importer.library(name, args, forms if several else forms[0])
    items = tuple(importer.item(made, index) for index in range(len(forms))) if several else (made,)
    if goes_last:
        items = tuple(importer.emit(op.permute_dims(item, _TO_FRONT)) for item in items)
    return items if several else items[0]


def read_from_behind(importer, x: Expr) -> Expr:
    """``x``, seen as a permutation of what has its channels behind."""
    return importer.emit(op.permute_dims(importer.emit(op.permute_dims(x, _TO_BACK)), _TO_FRONT))


def _per_axis(value, rank: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * rank if len(values) == 1 else values


def _cast_behind(importer, weight):
    """A weight that is the cast of another, with what it reads put in the order of channels_last before: what is stored
    lies as the convolution takes it, forward and backward."""
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
    y = library_of_images(importer, "convolution", [x, weight, *geometry, bool(transposed), groups], out)
    if bias is None:
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
    if rank == 1:  # torch has no backward kernel of its own for one axis
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
"""Element types of layers that are cuDNN's in eager, too."""

_NARROW, _NARROW_RNN = 128, 256
"""Elements of a state up to which cuDNN keeps a float32 weight on the chip, and is quicker whatever else there is."""

_MANY_ROWS, _MANY_ELEMENTS = 64, 1 << 15
"""Rows, and elements of a state of all rows, up to which a loop's products, of parts of the weight, are quicker than
cuDNN's in TF32."""

_FEW_ROWS = 16
"""Rows up to which they are also where there are several layers or directions, which cuDNN runs side by side."""


def cudnn_is_quicker(cell: str, x: Expr, states: Sequence[Expr]) -> bool:
    """Whether cuDNN's kernels, recorded, take less time than recorded loops: a rule of what was measured (H200).

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
        TensorForm((*shape(x)[:2], size * (2 if both_ways else 1)), kind),
        *(TensorForm((rows, batch, size), kind) for _ in states),
        TensorForm((workspace,), torch.uint8),
    ]
    made = importer.library("recurrent_layers", [options, len(states), x, *weights, *states], results)
    return [importer.item(made, index) for index in range(1 + len(states))]


@functools.lru_cache(maxsize=64)
def _workspace(
    options: str, extents: tuple[tuple[int, ...], ...], kind: torch.dtype, device: torch.device, settings: str
) -> int:
    """Bytes of cuDNN's workspace, which it alone knows; none where there is no cuDNN.

    Args:
        settings: what the choice among cuDNN's kernels depends on.
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
