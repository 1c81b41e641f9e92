"""Other ways to the numbers of a convolution and its VJPs on the CPU, with the arguments of :mod:`.convolution`.

Which is quickest depends on the sizes and on the processor: tuning tries them. One that is not for the arguments that
it is given raises ``ValueError``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from bridge.base.torch_internals import aten
from bridge.library.convolution import convolution, convolution_backward_input, convolution_backward_weight
from bridge.library.registry import library_function

__all__ = ["FORMS"]

FORMS: Mapping[str, tuple[str, ...]] = {
    "convolution": ("convolution_in_channels_last", "convolution_by_product"),
    "convolution_backward_input": (
        "convolution_backward_input_in_channels_last",
        "convolution_backward_input_by_product",
        "convolution_backward_input_by_convolution",
    ),
    "convolution_backward_weight": (
        "convolution_backward_weight_in_channels_last",
        "convolution_backward_weight_by_product",
    ),
}
"""By the name of a library function, those of the same arguments that give its results, to rounding."""


def _last(x: Tensor) -> Tensor:
    if x.ndim != 4:
        raise ValueError(f"channels_last: wanted an image, got {x.ndim} axes")
    return x.contiguous(memory_format=torch.channels_last)


@library_function("convolution_in_channels_last", aten.convolution)
def convolution_in_channels_last(x, weight, *geometry):
    return convolution(_last(x), weight, *geometry)


@library_function("convolution_backward_input_in_channels_last", aten.convolution_backward)
def convolution_backward_input_in_channels_last(grad, weight, extents, *geometry):
    return convolution_backward_input(_last(grad), weight, extents, *geometry)


@library_function("convolution_backward_weight_in_channels_last", aten.convolution_backward)
def convolution_backward_weight_in_channels_last(grad, x, extents, *geometry):
    return convolution_backward_weight(_last(grad), _last(x), extents, *geometry)


def _patches(x: Tensor, kernel: Sequence[int], geometry: Sequence) -> Tensor:
    """What each place of the result reads: ``(batch, channels and places of the kernel, places)``."""
    stride, padding, dilation, _, _, _ = geometry
    if (*kernel, *stride, *padding) == (1, 1, 1, 1, 0, 0):
        return x.flatten(2)
    return F.unfold(x, kernel, dilation, padding, stride)


def _want_one_product(x: Tensor, geometry: Sequence) -> None:
    *_, transposed, groups = geometry
    if x.ndim != 4 or transposed or groups != 1:
        raise ValueError("wanted a convolution of images, in one group and not transposed")


@library_function("convolution_by_product")
def convolution_by_product(x, weight, *geometry):
    """A product with the patches of ``x`` (K. Chellapilla, S. Puri, P. Simard, 2006)."""
    _want_one_product(x, geometry)
    stride, padding, dilation, *_ = geometry
    made = weight.flatten(1) @ _patches(x, weight.shape[2:], geometry)
    axes = zip(x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    places = [(size + 2 * pad - gap * (taps - 1) - 1) // step + 1 for size, taps, step, pad, gap in axes]
    return made.unflatten(2, places)


@library_function("convolution_backward_input_by_product")
def convolution_backward_input_by_product(grad, weight, extents, *geometry):
    _want_one_product(grad, geometry)
    stride, padding, dilation, *_ = geometry
    patches = weight.flatten(1).t() @ grad.flatten(2)
    return F.fold(patches, extents[2:], weight.shape[2:], dilation, padding, stride)


@library_function("convolution_backward_weight_by_product")
def convolution_backward_weight_by_product(grad, x, extents, *geometry):
    _want_one_product(grad, geometry)
    return (grad.flatten(2) @ _patches(x, extents[2:], geometry).mT).sum(0).view(extents)


@library_function("convolution_backward_input_by_convolution", aten.convolution)
def convolution_backward_input_by_convolution(grad, weight, extents, *geometry):
    """The convolution of ``grad`` with the weight turned around, inputs and outputs of each group swapped."""
    stride, padding, dilation, _, transposed, groups = geometry
    outer, inner, *kernel = weight.shape
    around = [gap * (taps - 1) - pad for gap, taps, pad in zip(dilation, kernel, padding, strict=True)]
    if transposed or min(around) < 0 or any(step != 1 for step in stride):
        raise ValueError("wanted a convolution of stride 1, padded by less than its kernel and not transposed")
    swapped = weight.unflatten(0, (groups, outer // groups)).transpose(1, 2).flip(*range(3, weight.ndim + 1))
    return convolution(grad, swapped.reshape(groups * inner, outer // groups, *kernel), stride, around, *geometry[2:])
