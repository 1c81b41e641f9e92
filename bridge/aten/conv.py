"""Convolutions of any rank and pooling → library functions."""

from __future__ import annotations

from tvm import relax

from autodiff.ir import dtype, shape
from bridge.aten.channels_last import is_channels_last, library_of_images
from bridge.aten.reductions import reduce
from bridge.aten.registry import UnsupportedUse, converts
from bridge.base.torch_internals import aten

op = relax.op


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
