"""Convolutions and their VJPs; those named ``last`` give torch's channels_last, with channels behind in the shape."""

from __future__ import annotations

import torch
from torch import Tensor

from bridge.base.torch_cuda import convolves_by_cudnn, cudnn_flags
from bridge.base.torch_internals import aten
from bridge.library.registry import into_given, library_function

__all__: list[str] = []


@library_function("convolution", aten.convolution)
def convolution(x, weight, *geometry):
    return _convolution(*map(_telling, (x, weight)), *geometry)


def _convolution(x, weight, stride, padding, dilation, output_padding, transposed, groups):
    return aten.convolution(x, weight, None, stride, padding, dilation, bool(transposed), output_padding, groups)


@into_given("convolution", aten.cudnn_convolution)
def convolution_into(outs, x, weight, *geometry):
    (out,) = outs
    x, weight = map(_telling, (x, weight))
    are_dense = all(each.is_contiguous() for each in (x, weight, out))
    return are_dense and _by_cudnn_into(out, x, weight, geometry)


def _telling(x):
    """A dense tensor with the strides that its extents tell. torch takes its layout from the strides, those of extents
    of 1 among them: a weight of one pixel may be in both, and then its result is in the other one."""
    return x.view(-1).view(x.shape) if 1 in x.shape and x.is_contiguous() else x


def _by_cudnn_into(out, x, weight, geometry):
    """cuDNN's convolution into ``out``, whose layout is the one that cuDNN is asked in; ``False`` if torch would not
    take cuDNN."""
    stride, padding, dilation, output_padding, transposed, groups = geometry
    options = stride, padding, dilation
    if transposed or not convolves_by_cudnn(x, weight, *options, False, output_padding, groups):
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
    """VJP with respect to the weight, whose shape is ``extents``."""
    weight = grad.new_empty(1).expand(extents)  # only its shape is read
    return _convolution_backward(grad, x, weight, geometry, [False, True, False])[1]


@library_function("convolution_last", aten.convolution)
def convolution_last(x, weight, *geometry):
    return _convolution(x, _channels_last(weight), *geometry).permute(0, 2, 3, 1)


@into_given("convolution_last", aten.cudnn_convolution)
def convolution_last_into(outs, x, weight, *geometry):
    out, weight = outs[0].permute(0, 3, 1, 2), _channels_last(weight)
    # torch does not tell the layouts of a single channel apart, and has cuDNN convolve float64 in the other one
    is_asked_so = x.dtype != torch.float64 and weight.shape[1] > 1 and out.shape[1] > 1
    return is_asked_so and _by_cudnn_into(out, x, weight, geometry)


@library_function("convolution_last_backward_input", aten.convolution_backward)
def convolution_last_backward_input(grad, weight, extents, *geometry):
    """VJP with respect to ``x``, whose shape is ``extents``: its channels are behind."""
    # its numbers are not read, but grad is copied into its layout
    x = torch.empty(extents, dtype=grad.dtype, device=grad.device, memory_format=torch.channels_last)
    return _backward_input(grad, _channels_last(weight), x, geometry).permute(0, 2, 3, 1)


@library_function("convolution_last_backward_weight", aten.convolution_backward)
def convolution_last_backward_weight(grad, x, extents, *geometry):
    """VJP with respect to the weight, whose shape is ``extents``: its inner channels are behind."""
    outer, inner, height, width = extents
    weight = grad.new_empty(outer, height, width, inner).permute(0, 3, 1, 2)  # only its shape and its layout are read
    return _convolution_backward(grad, x, weight, geometry, [False, True, False])[1].permute(0, 2, 3, 1)


def _channels_last(weight: Tensor) -> Tensor:
    """A weight in the layout that makes torch take it for the convolution: also one of a pixel, which is in both."""
    outer, inner, height, width = weight.shape
    weight = weight.permute(0, 2, 3, 1).contiguous()
    return weight.as_strided((outer, inner, height, width), (inner * height * width, 1, inner * width, inner))
