"""Matrix products by torch's kernels into given tensors: several ways to the same numbers, to rounding."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bridge.base.torch_internals import linear_pointwise
from bridge.library.registry import out_kernel

__all__: list[str] = []

Tensors = Sequence[torch.Tensor]


@out_kernel("mm")
def _mm(outs: Tensors, args: Tensors) -> None:
    """A product of matrices."""
    torch.mm(args[0], args[1], out=outs[0])


@out_kernel("mm_wide")
def _mm_wide(outs: Tensors, args: Tensors) -> None:
    """A product of matrices of a half type with a float32 result, on a GPU."""
    torch.mm(args[0], args[1], out_dtype=outs[0].dtype, out=outs[0])


@out_kernel("bmm")
def _bmm(outs: Tensors, args: Tensors) -> None:
    """A product of two equally long batches of matrices."""
    torch.bmm(args[0], args[1], out=outs[0])


@out_kernel("mm_swapped")
def _mm_swapped(outs: Tensors, args: Tensors) -> None:
    """A product of matrices, as the transposed product of the transposes: BLAS cuts the two differently."""
    outs[0].copy_(torch.mm(args[1].t(), args[0].t()).t())


@out_kernel("linear")
def _linear(outs: Tensors, args: Tensors) -> None:
    """A product of matrices by oneDNN's linear layer, whose weight is the transpose of the second."""
    outs[0].copy_(linear_pointwise(args[0], args[1].t(), None, "none", [], ""))
