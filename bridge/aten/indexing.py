"""Reads and writes at computed positions."""

from __future__ import annotations

import torch
from tvm import relax

from autodiff.ir import shape
from bridge.aten.registry import Refused, converts

aten = torch.ops.aten
op = relax.op


@converts(aten.gather.default)
def gather(importer, node, x, dim, index, *, sparse_grad=False):
    if sparse_grad:
        raise Refused("sparse gradients", "set sparse_grad=False")
    if not shape(x):
        return x
    dim %= len(shape(x))
    for axis, extent in enumerate(shape(index)):  # torch lets the index be smaller than the input
        if axis != dim and extent != shape(x)[axis]:
            x = importer.emit(op.strided_slice(x, [axis], [0], [extent], [1]))
    return importer.emit(op.gather_elements(x, index, dim))


@converts(aten.index.Tensor)
def index(importer, node, x, indices):
    dims = [dim for dim, i in enumerate(indices) if i is not None]
    given = [indices[dim] for dim in dims]
    if any(str(i.ty.dtype) in ("bool", "uint8") for i in given):
        raise Refused("indexing with a boolean mask: the result's shape depends on its numbers", "use torch.where")
    return importer.library("index", [x, dims, given], importer.out(node))
