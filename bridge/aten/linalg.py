"""Matrix products → ``relax.matmul``, which the compiler gives to generated code or to torch."""

from __future__ import annotations

import math

from tvm import relax

from autodiff.ir import dtype, shape
from bridge.aten.registry import converts
from bridge.aten.whole import whole
from bridge.base.torch_internals import aten

op = relax.op


@converts(aten.mm.default, aten.bmm.default, aten.matmul.default, aten.mv.default, aten.dot.default)
def matmul(importer, node, x, y):
    if "float" not in dtype(x):
        return whole(importer, node, x, y)
    return importer.emit(op.matmul(x, y))


@converts(aten.addmm.default, aten.baddbmm.default, aten.addmv.default)
def addmm(importer, node, bias, x, y, *, beta=1, alpha=1):
    if "float" not in dtype(x) or alpha == 0:  # which of torch's kernels multiply nan and inf by it is their choice
        return whole(importer, node, bias, x, y, beta=beta, alpha=alpha)
    return _combined(importer, matmul(importer, node, x, y), bias, beta, alpha)


@converts(aten.addbmm.default)
def addbmm(importer, node, bias, x, y, *, beta=1, alpha=1):
    if "float" not in dtype(x) or alpha == 0:
        return whole(importer, node, bias, x, y, beta=beta, alpha=alpha)
    product = importer.emit(op.sum(matmul(importer, node, x, y), axis=[0]))
    return _combined(importer, product, bias, beta, alpha)


def _combined(importer, product, bias, beta, alpha):
    if alpha != 1:
        product = importer.emit(op.multiply(product, importer.constant(alpha, dtype(product))))
    if beta == 0:  # torch ignores the addend, nan and inf included
        return product
    if beta != 1:
        bias = importer.emit(op.multiply(bias, importer.constant(beta, dtype(bias))))
    return importer.emit(op.add(product, bias))


@converts(aten.linear.default)
def linear(importer, node, x, weight, bias=None):
    if "float" not in dtype(x):
        return whole(importer, node, x, weight, bias)
    # one 2-d product, so that the weight's gradient is one 2-d product too
    *leading, features = shape(x)
    rows = importer.reshape(x, (math.prod(leading), features))
    is_vector = len(shape(weight)) == 1  # of one output feature, which the result has no axis for
    columns = importer.reshape(weight, (features, 1)) if is_vector else importer.emit(op.permute_dims(weight, [1, 0]))
    product = importer.reshape(importer.emit(op.matmul(rows, columns)), (*leading, *shape(weight)[:-1]))
    return product if bias is None else importer.emit(op.add(product, bias))
