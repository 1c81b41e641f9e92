"""Convolutions and their VJPs."""

from __future__ import annotations

from bridge.base.torch_internals import aten
from bridge.library.registry import library_function

__all__: list[str] = []


@library_function("convolution", aten.convolution)
def convolution(x, weight, stride, padding, dilation, output_padding, transposed, groups):
    return aten.convolution(x, weight, None, stride, padding, dilation, bool(transposed), output_padding, groups)


def _convolution_backward(grad, x, weight, geometry, wanted):
    stride, padding, dilation, output_padding, transposed, groups = geometry
    options = [stride, padding, dilation, bool(transposed), output_padding, groups]
    return aten.convolution_backward(grad, x, weight, None, *options, wanted)


@library_function("convolution_backward_input", aten.convolution_backward)
def convolution_backward_input(grad, weight, extents, *geometry):
    """VJP with respect to ``x``, whose shape is ``extents``."""
    x = grad.new_empty(1).expand(extents)  # only its shape is read
    return _convolution_backward(grad, x, weight, geometry, [True, False, False])[0]


@library_function("convolution_backward_weight", aten.convolution_backward)
def convolution_backward_weight(grad, x, extents, *geometry):
    """VJP with respect to the weight, whose shape is ``extents``."""
    weight = grad.new_empty(1).expand(extents)  # only its shape is read
    return _convolution_backward(grad, x, weight, geometry, [False, True, False])[1]
