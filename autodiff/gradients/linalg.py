"""Gradients of matrix products."""

from __future__ import annotations

import math
from collections.abc import Collection

from tvm.relax import op

from autodiff.extents import same_shape
from autodiff.gradients.registry import Emit, checks, gradient
from autodiff.gradients.tools import fit
from autodiff.ir import Call, Expr, Tuple, TupleGetItem, Var, dtype, shape

__all__ = []


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


@gradient("relax.outer")
def outer(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr]:
    """da = g b, db = g^T a"""
    a, b = call.args
    return [op.matmul(g, b), op.matmul(op.permute_dims(g, [1, 0]), a)]


@gradient("relax.einsum")
def einsum(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr]:
    """da = einsum of g and the other operands, back to the subscripts of a; subscripts that only a has are broadcast"""
    operands = call.args[0]
    count = len(operands.ty.fields)
    values = [
        operands.fields[i] if isinstance(operands, Tuple) else emit(TupleGetItem(operands, i)) for i in range(count)
    ]
    inputs, output = _subscripts(str(call.attrs.subscripts))
    partials = []
    for index, (value, letters) in enumerate(zip(values, inputs, strict=True)):
        others = [*values[:index], *values[index + 1 :]]
        other_letters = [*inputs[:index], *inputs[index + 1 :]]
        known = set(output).union(*other_letters)
        common = "".join(letter for letter in letters if letter in known)
        part = emit(op.einsum([g, *others], f"{','.join([output, *other_letters])}->{common}"))
        spread = [extent if letter in known else 1 for letter, extent in zip(letters, shape(value), strict=True)]
        partials.append(emit(op.broadcast_to(op.reshape(part, spread), shape(value))))
    return [Tuple(partials)]


def _subscripts(text: str) -> tuple[list[str], str]:
    """``"ij,jk->ik"`` as ``(["ij", "jk"], "ik")``; an implicit output is spelled out."""
    text = text.replace(" ", "")
    left, arrow, output = text.partition("->")
    inputs = left.split(",")
    if not arrow:
        letters = left.replace(",", "")
        output = "".join(sorted(letter for letter in set(letters) if letters.count(letter) == 1))
    return inputs, output


@checks("relax.einsum")
def check_einsum(call: Call, active: Collection[Var]) -> str | None:
    """An ellipsis or a diagonal has no rule."""
    text = str(call.attrs.subscripts)
    inputs, _ = _subscripts(text)
    if "." in text or any(len(set(letters)) < len(letters) for letters in inputs):
        return f"wanted subscripts without ellipsis and without repetition in one operand, got {text!r}"
    return None
