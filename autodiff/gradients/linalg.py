"""Gradients of layers: matrix products, and a normalization as one step."""

from __future__ import annotations

import math

from tvm.relax import op

from autodiff.extents import same, same_shape
from autodiff.gradients.registry import Emit, fit, gradient, library_gradient
from autodiff.ir import Call, Expr, Var, dtype, shape


@gradient("relax.matmul")
def matmul(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr]:
    """da = g b^T, db = a^T g; where b is a matrix, db is one product of two matrices, all rows of a batch together"""
    a, b = call.args
    if dtype(g) != dtype(a):  # a wider out_dtype
        g = emit(op.astype(g, dtype(a)))
    left = a if len(shape(a)) > 1 else emit(op.reshape(a, (1, *shape(a))))
    right = b if len(shape(b)) > 1 else emit(op.reshape(b, (*shape(b), 1)))
    batch = shape(g)[: max(len(shape(left)), len(shape(right))) - 2]
    product = emit(op.reshape(g, (*batch, shape(left)[-2], shape(right)[-1])))
    da = _of_shape(fit(op.matmul(product, _transposed(right, emit)), left, emit), a, emit)
    if len(shape(right)) > 2:
        return [da, _of_shape(fit(op.matmul(_transposed(left, emit), product), right, emit), b, emit)]
    db = op.matmul(_transposed(_as_matrix(left, emit), emit), _as_matrix(product, emit))
    # Not bound here: TVM folds the transpose of a weight into a product that it finds unbound.
    return [da, db if len(shape(b)) == 2 else op.reshape(emit(db), shape(b))]


def _of_shape(x: Expr, like: Expr, emit: Emit) -> Expr:
    x = emit(x)
    return x if same_shape(shape(x), shape(like)) else op.reshape(x, shape(like))


def _transposed(x: Expr, emit: Emit) -> Expr:
    rank = len(shape(x))
    return emit(op.permute_dims(x, [*range(rank - 2), rank - 1, rank - 2]))


def _as_matrix(x: Expr, emit: Emit) -> Expr:
    *rows, columns = shape(x)
    return x if len(rows) == 1 else emit(op.reshape(x, (math.prod(rows), columns)))


@library_gradient("library.normalize", wide=True)
def normalize(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
    """dx = rstd (g - mean(g) - y mean(g y)), where y = (x - mean(x)) rstd; without mean(g) where y = x rstd

    ``rstd`` keeps the reduced axes as size 1, and may be summed over any other axis of that size.
    """
    _, rstd, centred = call.args
    axes = [axis for axis, extent in enumerate(shape(rstd)) if same(extent, 1)]
    slope = emit(op.mean(emit(g * y), axes, keepdims=True))
    if not int(centred.value):
        return [rstd * (g - y * slope), None, None]
    offset = emit(op.mean(g, axes, keepdims=True))
    return [rstd * (emit(g - offset) - y * slope), None, None]
