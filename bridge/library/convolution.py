"""Convolutions, padding, interpolation, pooling and their VJPs.

Functions named ``last`` return channels-last results (torch's memory format).

Pooling: maximum, average, adaptive; 2-D with two window extents, else 3-D. ``last`` functions are 2-D, with channels
last in the results' shapes.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bridge.base.devices import HOST
from bridge.base.torch_cuda import convolves_by_cudnn, cudnn_flags
from bridge.base.torch_internals import VF, aten
from bridge.library.registry import into_given, library_function


@library_function("convolution", aten.convolution)
def convolution(x, weight, *geometry):
    return _convolution(*map(_telling, (x, weight)), *geometry)


def _convolution(x, weight, stride, padding, dilation, output_padding, transposed, groups, bias=None):
    return aten.convolution(x, weight, bias, stride, padding, dilation, bool(transposed), output_padding, groups)


@into_given("convolution", aten.cudnn_convolution)
def convolution_into(outs, x, weight, *geometry):
    (out,) = outs
    x, weight = map(_telling, (x, weight))
    are_dense = all(each.is_contiguous() for each in (x, weight, out))
    return are_dense and _by_cudnn_into(out, x, weight, geometry)


def _telling(x):
    """A dense tensor with canonical strides.

    torch derives the memory format from the strides, also for extents 1: a 1x1 weight may be in both formats, and then
    selects another result format.
    """
    return x.view(-1).view(x.shape) if 1 in x.shape and x.is_contiguous() else x


def _by_cudnn_into(out, x, weight, geometry):
    """cuDNN's convolution into ``out``, in the memory format of ``out``; ``False`` if torch would not use cuDNN."""
    stride, padding, dilation, output_padding, transposed, groups, *bias = geometry
    options = stride, padding, dilation
    if bias or transposed or not convolves_by_cudnn(x, weight, *options, False, output_padding, groups):
        return False
    aten.cudnn_convolution.out(x, weight, padding, stride, dilation, groups, *cudnn_flags(), out=out)
    return True


def _convolution_backward(grad, x, weight, geometry, wanted):
    stride, padding, dilation, output_padding, transposed, groups = geometry
    options = [stride, padding, dilation, bool(transposed), output_padding, groups]
    return aten.convolution_backward(grad, x, weight, None, *options, wanted)


@library_function("convolution_backward_input", aten.convolution_backward)
def convolution_backward_input(grad, weight, extents, *geometry):
    """VJP with respect to ``x``, whose shape is ``extents``."""
    return _backward_input(grad, weight, grad.new_empty(1).expand(extents), geometry)  # only its shape is read


def _backward_input(grad, weight, x, geometry):
    return _convolution_backward(grad, x, weight, geometry, [True, False, False])[0]


@library_function("convolution_backward_weight", aten.convolution_backward)
def convolution_backward_weight(grad, x, extents, *geometry):
    """VJP with respect to the weight, whose shape is ``extents``.

    oneDNN takes about half as long for a large depthwise kernel if the images are channels-last (ConvNeXt's: 41 and 22
    ms for 4 x 96 x 56 x 56 on one core of Zen 5; there is no gain for kernels below 5 x 5 or images of their size).
    """
    if _is_large_depthwise(x, extents, geometry):
        grad, x = (each.contiguous(memory_format=torch.channels_last) for each in (grad, x))
    weight = grad.new_empty(1).expand(extents)  # only its shape is read
    return _convolution_backward(grad, x, weight, geometry, [False, True, False])[1]


def _is_large_depthwise(x: Tensor, extents: Sequence[int], geometry: Sequence) -> bool:
    """Whether this is a convolution of float32 images on the CPU, each channel alone, by a kernel of 5 x 5 or more."""
    *_, transposed, groups = geometry
    if x.device.type != HOST.type or x.dtype != torch.float32 or x.ndim != 4 or transposed or groups != x.shape[1]:
        return False
    return extents[0] == groups and min(extents[2:]) >= 5 and all(map(operator.gt, x.shape[2:], extents[2:]))


@library_function("convolution_last", aten.convolution)
def convolution_last(x, weight, *geometry):
    return _convolution(x, _channels_last(weight), *geometry).permute(_TO_BACK)


@into_given("convolution_last", aten.cudnn_convolution)
def convolution_last_into(outs, x, weight, *geometry):
    out, weight = outs[0].permute(0, 3, 1, 2), _channels_last(weight)
    # torch does not tell the formats of a single channel apart, and runs cuDNN in the other one for float64
    is_asked_so = x.dtype != torch.float64 and weight.shape[1] > 1 and out.shape[1] > 1
    return is_asked_so and _by_cudnn_into(out, x, weight, geometry)


@library_function("convolution_last_backward_input", aten.convolution_backward)
def convolution_last_backward_input(grad, weight, extents, *geometry):
    """VJP with respect to ``x``, of shape ``extents``; channels last."""
    # its numbers are not read, but grad is copied into its layout
    x = VF.empty(extents, dtype=grad.dtype, device=grad.device, memory_format=torch.channels_last)
    return _backward_input(grad, _channels_last(weight), x, geometry).permute(0, 2, 3, 1)


@library_function("convolution_last_backward_weight", aten.convolution_backward)
def convolution_last_backward_weight(grad, x, extents, *geometry):
    """VJP with respect to the weight, of shape ``extents``; inner channels last."""
    outer, inner, height, width = extents
    weight = grad.new_empty(outer, height, width, inner).permute(0, 3, 1, 2)  # only its shape and layout are read
    return _convolution_backward(grad, x, weight, geometry, [False, True, False])[1].permute(0, 2, 3, 1)


def _channels_last(weight: Tensor) -> Tensor:
    """A weight in the layout that selects torch's channels-last convolution, also a 1x1 weight, which is in both."""
    outer, inner, height, width = weight.shape
    weight = weight.permute(0, 2, 3, 1).contiguous()
    return weight.as_strided((outer, inner, height, width), (inner * height * width, 1, inner * width, inner))


_WIDER = torch.complex128, torch.complex64, torch.int32
"""Types to move rows as; the widest one that divides them is used."""
_SHORT_ROW = 1024
"""Bytes of a row below which a processor fills the whole row as fast as only its end."""


def pad_into(out: Tensor, x: Tensor, begins: Sequence[int], number: float = 0) -> None:
    """Writes a tensor into ``out`` from the positions ``begins`` on, and ``number`` into the rest.

    ``out``: dense, on the tensor's device and of its dtype, with as many axes and enough room.
    """
    whole = not out.is_cuda and out.shape[-1] != x.shape[-1] and out.shape[-1] * out.element_size() < _SHORT_ROW
    inside = out.fill_(number) if whole else out
    for axis, (begin, extent) in enumerate(zip(begins, x.shape, strict=True)):
        end = begin + extent
        for start, width in ((0, begin), (end, out.shape[axis] - end)):
            if width and not whole:
                inside.narrow(axis, start, width).fill_(number)
        inside = inside.narrow(axis, begin, extent)
    move(x, inside)


def move(source: Tensor, target: Tensor) -> None:
    """Copies a tensor in the widest type that divides its rows."""
    for kind in _WIDER:
        unit = kind.itemsize // source.element_size()
        if all(_is_of(unit, each) for each in (source, target)):
            source, target = source.view(kind), target.view(kind)
            break
    target.copy_(source)


def _is_of(unit: int, x: Tensor) -> bool:
    """Whether rows begin and end at multiples of ``unit`` elements."""
    if unit == 0 or x.ndim == 0 or x.stride(-1) != 1:
        return False
    numbers = x.shape[-1], *x.stride()[:-1], x.storage_offset(), x.data_ptr() // x.element_size()
    return not any(number % unit for number in numbers)


def _upsampling(mode: str, direction: str, align_corners: int, scales: tuple[float, ...]) -> tuple[Any, list[Any]]:
    """The operator, and its arguments after the sizes: ``align_corners`` but for nearest, then one scale per axis."""
    prefix = "_" if "exact" in mode or mode.endswith("aa") else ""
    operator = getattr(aten, f"{prefix}upsample_{mode}{direction}").default
    given = [scale or None for scale in scales]
    return operator, given if mode.startswith("nearest") else [bool(align_corners), *given]


@library_function("upsample")
def upsample(x, mode, output_size, align_corners, *scales):
    operator, options = _upsampling(mode, "", align_corners, scales)
    return operator(x, output_size, *options)


@library_function("upsample_backward")
def upsample_backward(grad, extents, mode, output_size, align_corners, *scales):
    operator, options = _upsampling(mode, "_backward", align_corners, scales)
    return operator(grad, output_size, extents, *options)


_TO_BACK, _TO_FRONT = (0, 2, 3, 1), (0, 3, 1, 2)
"""Axis orders: channels from the second place to the last, and back."""


def _with_channels_last(name: str, function: Callable[..., Any], *operators: object) -> None:
    """Registers ``name``: the function with channels last in its results' shapes."""

    @library_function(name, *operators)
    def last(*arguments):
        made = function(*arguments)
        return tuple(each.permute(_TO_BACK) for each in made) if isinstance(made, tuple) else made.permute(_TO_BACK)


_with_channels_last("upsample_last", upsample)
_with_channels_last("upsample_last_backward", upsample_backward)


def _image(grad: Tensor, extents: Sequence[int]) -> Tensor:
    """A channels-last tensor of which kernels read only the shape and the layout."""
    return grad.new_empty([extents[axis] for axis in _TO_BACK]).permute(_TO_FRONT)


def _pools(name: str, kernels: str, options: Callable[..., tuple] | None, positions: bool, has_last: bool) -> None:
    """Registers a pool, its VJP, and with ``has_last`` both with channels last.

    Args:
        kernels: the name of torch's operators, with ``{}`` for the number of axes.
        options: the attributes → the operators' arguments, forward and backward; ``None``: an output size, which only
            the forward takes.
        positions: whether the VJP reads the places of the maxima, the second result.
    """
    forwards, backwards = ([getattr(aten, kernels.format(rank) + end) for rank in (2, 3)] for end in ("", "_backward"))

    @library_function(name, *forwards)
    def pool(x, *attributes):
        return forwards[len(attributes[0]) - 2](x, *(attributes if options is None else options(*attributes)))

    def vjp(grad, given, image):
        places, (extents, *attributes) = given[:positions], given[positions:]
        rest = () if options is None else options(*attributes)
        return backwards[len(attributes[0]) - 2](grad, image(extents), *rest, *places)

    @library_function(f"{name}_backward", *backwards)
    def pool_backward(grad, *given):
        return vjp(grad, given, grad.new_empty(1).expand)

    if has_last:
        _with_channels_last(f"{name}_last", pool, *forwards)

        def last_vjp(grad, *given):
            return vjp(grad, given, functools.partial(_image, grad))

        _with_channels_last(f"{name}_last_backward", last_vjp, *backwards)


def _of_window(kernel_size, stride, padding, dilation, ceil_mode):
    return kernel_size, stride, padding, dilation, bool(ceil_mode)


def _of_average(kernel_size, stride, padding, ceil_mode, include_pad, divisor):
    return kernel_size, stride, padding, bool(ceil_mode), bool(include_pad), divisor or None


_pools("max_pool", "max_pool{}d_with_indices", _of_window, positions=True, has_last=True)
_pools("adaptive_max_pool", "adaptive_max_pool{}d", None, positions=True, has_last=False)
_pools("avg_pool", "avg_pool{}d", _of_average, positions=False, has_last=True)
_pools("adaptive_avg_pool", "_adaptive_avg_pool{}d", None, positions=False, has_last=True)


@into_given("max_pool_last", aten.max_pool2d_with_indices)
def max_pool_last_into(outs, x, kernel_size, stride, padding, dilation, ceil_mode):
    y, positions = (each.permute(0, 3, 1, 2) for each in outs)
    # torch's kernel derives the format of its results from the strides of x, whatever the memory is
    if not x.is_contiguous(memory_format=torch.channels_last):
        return False
    _, channels, height, width = x.shape
    x = x.as_strided(x.shape, (height * width * channels, 1, width * channels, channels))
    given = x, kernel_size, stride, padding, dilation, bool(ceil_mode)
    aten.max_pool2d_with_indices.out(*given, out=y, indices=positions)
    return True
