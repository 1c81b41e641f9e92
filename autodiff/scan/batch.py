"""Batching: an operator of one step -> the same for all steps at once, on tensors with the steps in front.

Matrix products, and the point-wise operators and layer norms around them: one large product for many small ones.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from tvm.relax import op

from autodiff.ir import Call, Expr, op_name, shape
from autodiff.ops import having
from autodiff.scan.stacks import RESHAPES, Emit

__all__ = ["batched", "batches", "is_product"]

Arguments = Mapping[int, Expr]
"""By their place in a call."""

_ELEMENTWISE = having("elementwise")


def is_product(value: Expr) -> bool:
    """Whether hoisting pays: a matrix product."""
    return op_name(value) == "relax.matmul"


def batches(value: Expr, xs: Collection[int]) -> bool:
    """Whether a call can be made for all steps at once, its arguments in these places having the steps in front."""
    name = op_name(value)
    if name == "relax.matmul":
        left, right = (len(shape(arg)) for arg in value.args[:])
        return set(xs) == {0} and left >= 2 and right == 2
    if name in RESHAPES or name == "relax.nn.layer_norm":
        return set(xs) == {0}
    return name in _ELEMENTWISE


def batched(value: Expr, steps: int, constants: Arguments, xs: Arguments, emit: Emit) -> Expr:
    """That call, its result with the steps in front.

    Args:
        constants, xs: arguments by their place in the call: of all steps, and with the steps in front.
    """
    return _RULES.get(op_name(value), _elementwise)(value, steps, constants, xs, emit)


def _elementwise(call: Call, steps: int, constants: Arguments, xs: Arguments, emit: Emit) -> Expr:
    rank = len(shape(call))
    args = []
    for place, arg in enumerate(call.args[:]):
        value = xs.get(place, constants.get(place, arg))
        if place in xs and len(own := shape(value)[1:]) < rank:
            value = emit(op.reshape(value, (steps, *[1] * (rank - len(own)), *own)), "steps")
        args.append(value)
    return Call(call.op, args, call.attrs, call.ty_args)


def _matmul(call: Call, steps: int, constants: Arguments, xs: Arguments, emit: Emit) -> Expr:
    *outer, inner = shape(call.args[0])
    flat = emit(op.reshape(xs[0], (steps * math.prod(outer), inner)), "steps")
    made = emit(Call(call.op, [flat, constants.get(1, call.args[1])], call.attrs, call.ty_args), "products")
    return op.reshape(made, (steps, *shape(call)))


def _reshape(call: Call, steps: int, constants: Arguments, xs: Arguments, emit: Emit) -> Expr:
    return op.reshape(xs[0], (steps, *shape(call)))


def _layer_norm(call: Call, steps: int, constants: Arguments, xs: Arguments, emit: Emit) -> Expr:
    rank, attrs = len(shape(call)), call.attrs
    weights = [constants.get(place, call.args[place]) for place in (1, 2)]
    axes = [int(axis) % rank + 1 for axis in attrs.axes]
    return op.nn.layer_norm(xs[0], *weights, axes, float(attrs.epsilon), bool(attrs.center), bool(attrs.scale))


_RULES = {
    "relax.matmul": _matmul,
    **dict.fromkeys(RESHAPES, _reshape),
    "relax.nn.layer_norm": _layer_norm,
}
