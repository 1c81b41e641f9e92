"""Padding, interpolation and pooling, and their VJPs.

Pooling and its VJPs: maximum, average, adaptive; 2-D where there are two window extents, else 3-D.
Those named ``last`` are 2-D, with channels behind in the results' shapes: torch's channels_last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bridge.base.torch_internals import aten
from bridge.library.registry import into_given, library_function

__all__ = ["move", "pad_into"]

_WIDER = torch.complex128, torch.complex64, torch.int32
"""As which types rows are moved, the widest one that divides them."""
_SHORT_ROW = 1024
"""Bytes of a row below which a processor fills all of it as soon as a number at its end."""


def pad_into(out: Tensor, x: Tensor, begins: Sequence[int], number: float = 0) -> None:
    """Writes a tensor of as many axes from ``begins`` on, and ``number`` into all that is before and behind it.

    Args:
        out: dense, on the tensor's device and of its element type; where it has room for it.
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
    """Copies rows, by as many numbers at once as divide them."""
    for kind in _WIDER:
        unit = kind.itemsize // source.element_size()
        if all(_is_of(unit, each) for each in (source, target)):
            source, target = source.view(kind), target.view(kind)
            break
    target.copy_(source)


def _is_of(unit: int, x: Tensor) -> bool:
    """Whether rows begin, and end, at multiples of so many numbers."""
    if unit == 0 or x.ndim == 0 or x.stride(-1) != 1:
        return False
    numbers = x.shape[-1], *x.stride()[:-1], x.storage_offset(), x.data_ptr() // x.element_size()
    return not any(number % unit for number in numbers)


def _upsampling(mode: str, direction: str, align_corners: int, scales: tuple[float, ...]) -> tuple[Any, list[Any]]:
    """The operator, and the options behind the sizes: ``align_corners`` but for nearest, then one scale per axis."""
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


@library_function("upsample_last")
def upsample_last(x, *options):
    return upsample(x, *options).permute(0, 2, 3, 1)


@library_function("upsample_last_backward")
def upsample_last_backward(grad, extents, *options):
    return upsample_backward(grad, extents, *options).permute(0, 2, 3, 1)


@library_function("max_pool", aten.max_pool2d_with_indices, aten.max_pool3d_with_indices)
def max_pool(x, kernel_size, stride, padding, dilation, ceil_mode):
    pool = aten.max_pool2d_with_indices if len(kernel_size) == 2 else aten.max_pool3d_with_indices
    return pool(x, kernel_size, stride, padding, dilation, bool(ceil_mode))


@library_function("max_pool_backward", aten.max_pool2d_with_indices_backward, aten.max_pool3d_with_indices_backward)
def max_pool_backward(grad, positions, extents, kernel_size, stride, padding, dilation, ceil_mode):
    rank = len(kernel_size)
    pool = aten.max_pool2d_with_indices_backward if rank == 2 else aten.max_pool3d_with_indices_backward
    x = grad.new_empty(1).expand(extents)
    return pool(grad, x, kernel_size, stride, padding, dilation, bool(ceil_mode), positions)


@library_function("max_pool_last", aten.max_pool2d_with_indices)
def max_pool_last(x, *geometry):
    """That of planes, with channels behind in the results' shapes."""
    return tuple(each.permute(0, 2, 3, 1) for each in max_pool(x, *geometry))


@into_given("max_pool_last", aten.max_pool2d_with_indices)
def max_pool_last_into(outs, x, kernel_size, stride, padding, dilation, ceil_mode):
    y, positions = (each.permute(0, 3, 1, 2) for each in outs)
    # torch's kernel writes in the layout that the strides of x tell, whatever the memory's is
    if not x.is_contiguous(memory_format=torch.channels_last):
        return False
    _, channels, height, width = x.shape
    x = x.as_strided(x.shape, (height * width * channels, 1, width * channels, channels))
    given = x, kernel_size, stride, padding, dilation, bool(ceil_mode)
    aten.max_pool2d_with_indices.out(*given, out=y, indices=positions)
    return True


def _image(grad, extents):
    """Memory in channels_last of which a kernel reads the shape and the layout alone."""
    batch, channels, height, width = extents
    return grad.new_empty(batch, height, width, channels).permute(0, 3, 1, 2)


@library_function("max_pool_last_backward", aten.max_pool2d_with_indices_backward)
def max_pool_last_backward(grad, positions, extents, kernel_size, stride, padding, dilation, ceil_mode):
    """VJP with respect to ``x``, whose shape is ``extents``: its channels are behind."""
    given = (grad, _image(grad, extents), kernel_size, stride, padding, dilation, bool(ceil_mode), positions)
    return aten.max_pool2d_with_indices_backward(*given).permute(0, 2, 3, 1)


@library_function("adaptive_max_pool", aten.adaptive_max_pool2d, aten.adaptive_max_pool3d)
def adaptive_max_pool(x, output_size):
    return (aten.adaptive_max_pool2d if len(output_size) == 2 else aten.adaptive_max_pool3d)(x, output_size)


@library_function("adaptive_max_pool_backward", aten.adaptive_max_pool2d_backward, aten.adaptive_max_pool3d_backward)
def adaptive_max_pool_backward(grad, positions, extents, output_size):
    rank = len(output_size)
    pool = aten.adaptive_max_pool2d_backward if rank == 2 else aten.adaptive_max_pool3d_backward
    return pool(grad, grad.new_empty(1).expand(extents), positions)


@library_function("avg_pool", aten.avg_pool2d, aten.avg_pool3d)
def avg_pool(x, kernel_size, stride, padding, ceil_mode, include_pad, divisor):
    pool = aten.avg_pool2d if len(kernel_size) == 2 else aten.avg_pool3d
    return pool(x, kernel_size, stride, padding, bool(ceil_mode), bool(include_pad), divisor or None)


@library_function("avg_pool_backward", aten.avg_pool2d_backward, aten.avg_pool3d_backward)
def avg_pool_backward(grad, extents, kernel_size, stride, padding, ceil_mode, include_pad, divisor):
    pool = aten.avg_pool2d_backward if len(kernel_size) == 2 else aten.avg_pool3d_backward
    x = grad.new_empty(1).expand(extents)
    return pool(grad, x, kernel_size, stride, padding, bool(ceil_mode), bool(include_pad), divisor or None)


@library_function("adaptive_avg_pool", aten._adaptive_avg_pool2d, aten._adaptive_avg_pool3d)
def adaptive_avg_pool(x, output_size):
    return (aten._adaptive_avg_pool2d if len(output_size) == 2 else aten._adaptive_avg_pool3d)(x, output_size)


@library_function("adaptive_avg_pool_backward", aten._adaptive_avg_pool2d_backward, aten._adaptive_avg_pool3d_backward)
def adaptive_avg_pool_backward(grad, extents, output_size):
    rank = len(output_size)
    pool = aten._adaptive_avg_pool2d_backward if rank == 2 else aten._adaptive_avg_pool3d_backward
    return pool(grad, grad.new_empty(1).expand(extents))


@library_function("avg_pool_last", aten.avg_pool2d)
def avg_pool_last(x, *geometry):
    return avg_pool(x, *geometry).permute(0, 2, 3, 1)


@library_function("avg_pool_last_backward", aten.avg_pool2d_backward)
def avg_pool_last_backward(grad, extents, kernel_size, stride, padding, ceil_mode, include_pad, divisor):
    """VJP with respect to ``x``, whose shape is ``extents``: its channels are behind."""
    given = (grad, _image(grad, extents), kernel_size, stride, padding, bool(ceil_mode), bool(include_pad))
    return aten.avg_pool2d_backward(*given, divisor or None).permute(0, 2, 3, 1)


@library_function("adaptive_avg_pool_last", aten._adaptive_avg_pool2d)
def adaptive_avg_pool_last(x, output_size):
    return adaptive_avg_pool(x, output_size).permute(0, 2, 3, 1)


@library_function("adaptive_avg_pool_last_backward", aten._adaptive_avg_pool2d_backward)
def adaptive_avg_pool_last_backward(grad, extents, output_size):
    return aten._adaptive_avg_pool2d_backward(grad, _image(grad, extents)).permute(0, 2, 3, 1)
