"""Matrix products by torch's kernels into given tensors: several ways to the same numbers, to rounding."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bridge.base.mkl import multiply_packed
from bridge.base.session import SESSION
from bridge.base.torch_internals import linear_pointwise
from bridge.library.padding import pad_into
from bridge.library.registry import out_kernel

__all__: list[str] = []

Tensors = Sequence[torch.Tensor]


@out_kernel("mm")
def _mm(outs: Tensors, args: Tensors) -> None:
    """A product of matrices."""
    torch.mm(args[0], args[1], out=outs[0])


_ZEROS: dict[tuple[torch.device, int], torch.Tensor] = SESSION.cache("programs", {})
"""By their number, a power of two. None goes: recorded graphs read them at their addresses."""


@out_kernel("pad")
def _pad(outs: Tensors, args: Tensors, begins: Sequence[int] = (0, 0), number: float = 0) -> None:
    """A tensor from ``begins`` on, and ``number`` around it; unless told otherwise, a matrix before zeros."""
    pad_into(outs[0], args[0], begins, number)


@out_kernel("mm_lt")
def _mm_lt(outs: Tensors, args: Tensors) -> None:
    """A product of float32 matrices by cuBLASLt, which torch calls for a product with a bias: here it is zero.

    Where a stream is captured by somebody before this has run, torch's own: zeros made there would not last.
    """
    count, device = args[1].shape[1], args[0].device
    key = device, 1 << (count - 1).bit_length()
    if key not in _ZEROS:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            torch.mm(args[0], args[1], out=outs[0])
            return
        _ZEROS[key] = torch.zeros(key[1], device=device)
    torch.addmm(_ZEROS[key][:count], args[0], args[1], out=outs[0])


@out_kernel("mm_biased")
def _mm_biased(outs: Tensors, args: Tensors) -> None:
    """A vector that is added to each row of a product of matrices, before the sum is rounded."""
    torch.addmm(args[0], args[1], args[2], out=outs[0])


@out_kernel("mm_wide")
def _mm_wide(outs: Tensors, args: Tensors) -> None:
    """A product of matrices of a half type with a float32 result, on a GPU."""
    torch.mm(args[0], args[1], out_dtype=outs[0].dtype, out=outs[0])


@out_kernel("bmm")
def _bmm(outs: Tensors, args: Tensors) -> None:
    """A product of two equally long batches of matrices."""
    torch.bmm(args[0], args[1], out=outs[0])


@out_kernel("bmm_wide")
def _bmm_wide(outs: Tensors, args: Tensors) -> None:
    """A product of batches of matrices of a half type with a float32 result; off a GPU of what is cast before."""
    if args[0].is_cuda:
        torch.bmm(args[0], args[1], out_dtype=outs[0].dtype, out=outs[0])
    else:
        torch.bmm(args[0].to(outs[0].dtype), args[1].to(outs[0].dtype), out=outs[0])


@out_kernel("mm_swapped")
def _mm_swapped(outs: Tensors, args: Tensors) -> None:
    """A product of matrices, as the transposed product of the transposes: BLAS cuts the two differently."""
    outs[0].copy_(torch.mm(args[1].t(), args[0].t()).t())


@out_kernel("linear")
def _linear(outs: Tensors, args: Tensors) -> None:
    """A product of matrices by oneDNN's linear layer, whose weight is the transpose of the second."""
    outs[0].copy_(linear_pointwise(args[0], args[1].t(), None, "none", [], ""))


@out_kernel("packed")
def _packed(outs: Tensors, args: Tensors, rows: int) -> None:
    """A product of float32 matrices whose second one is a constant that MKL has laid out, for so many rows of the
    first; torch's own where it lies as it was given."""
    if args[1].ndim == 1:
        multiply_packed(args[0], args[1], outs[0])
    else:
        torch.mm(args[0], args[1], out=outs[0])
