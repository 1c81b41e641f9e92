"""torch's kernels that write into given tensors: ``function(outs, args, **attributes)``, outs and args tensors.

Outs are dense; args may have any strides.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["concat", "copy", "gather", "index_select", "matmul", "scan", "scatter", "stack"]

Tensors = Sequence[torch.Tensor]


def concat(outs: Tensors, args: Tensors, *, axis: int) -> None:
    """The args one after another along an axis."""
    torch.cat(list(args), axis, out=outs[0])


def copy(outs: Tensors, args: Tensors) -> None:
    """The only arg's elements in order."""
    outs[0].copy_(args[0])


def stack(outs: Tensors, args: Tensors, *, axis: int) -> None:
    """The args along a new axis."""
    torch.stack(list(args), axis, out=outs[0])


def scan(outs: Tensors, args: Tensors, *, product: bool, axis: int, exclusive: bool) -> None:
    """Sums (or products) up to each element along an axis, in the out's type.

    An exclusive scan starts with the neutral element and leaves the last one out.
    """
    function, (out,), (x,) = torch.cumprod if product else torch.cumsum, outs, args
    if not exclusive:
        function(x, axis, dtype=out.dtype, out=out)
    elif count := x.shape[axis]:
        out.narrow(axis, 0, 1).fill_(int(product))
        rest = function(x.narrow(axis, 0, count - 1), axis, dtype=out.dtype)
        out.narrow(axis, 1, count - 1).copy_(rest)


def gather(outs: Tensors, args: Tensors, *, axis: int) -> None:
    """``args = (x, index)``, int64: ``out[i][j] = x[index[i][j]][j]`` for axis 0, and so on."""
    torch.gather(args[0], axis, args[1], out=outs[0])


def scatter(outs: Tensors, args: Tensors, *, axis: int, add: bool) -> None:
    """``args = (x, index, source)``: ``x`` with elements replaced by, or added to, those of ``source``."""
    (torch.scatter_add if add else torch.scatter)(args[0], axis, args[1], args[2], out=outs[0])


def index_select(outs: Tensors, args: Tensors, *, axis: int) -> None:
    """``args = (x, index)``, index 1-D, int32 or int64. ``IndexError`` from torch for one outside of the tensor."""
    torch.index_select(args[0], axis, args[1], out=outs[0])


def matmul(outs: Tensors, args: Tensors, *, batched: bool) -> None:
    """A product of matrices, or of two equally long batches of them."""
    (torch.bmm if batched else torch.mm)(args[0], args[1], out=outs[0])
