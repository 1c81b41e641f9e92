"""Pooling and its VJPs: maximum, average, adaptive; 2-D where there are two window extents, else 3-D.

Those named ``last`` are 2-D, with channels behind in the results' shapes: torch's channels_last.
"""

from __future__ import annotations

import torch

from bridge.base.torch_internals import aten
from bridge.library.registry import into_given, library_function

__all__: list[str] = []


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
