"""Undefined gradients: a library operator's derivative with gradients of zeros -> the same without them.

Autograd leaves the gradient of a result that nothing uses undefined, and the operator's formula then leaves its terms
out. It is more than a saving: of a singular value decomposition whose vectors are not used, the terms for these are
``0 / 0`` where values repeat.
"""

from __future__ import annotations

from tvm.relax import op

from autodiff.body import Body, on_functions
from autodiff.ir import Call, Expr, ShapeExpr, dtype, library_name, op_name, shape
from autodiff.library import call as library_call
from autodiff.rewrite import Scope, rewrite

__all__ = ["undefined_gradients"]

_ZEROS = ("relax.zeros", "relax.zeros_like")


@on_functions
def undefined_gradients(body: Body, since: int = 0) -> None:
    """``library.operator_vjp`` takes no gradient that is made as zeros; without any, it is zeros itself.

    Safe: it is what autograd computes, and the same number wherever the terms left out are finite.
    """
    rewrite(body, _RULES, since)


def _defined_only(call: Call, scope: Scope) -> Expr | None:
    if library_name(call) != "library.operator_vjp":
        return None
    _, name, arguments, wanted, outputs, *rest = call.args
    indices = [int(index) for index in outputs.values]
    tensors, grads = rest[: len(rest) - len(indices)], rest[len(rest) - len(indices) :]
    defined = [
        (index, grad)
        for index, grad in zip(indices, grads, strict=True)
        if op_name(scope.definition(grad)) not in _ZEROS
    ]
    if len(defined) == len(indices):
        return None
    if not defined:
        return op.zeros(shape(call), dtype(call))
    left = ShapeExpr([index for index, _ in defined])
    return library_call(
        "operator_vjp", [name, arguments, wanted, left, *tensors, *(grad for _, grad in defined)], call.ty
    )


_RULES = {"relax.call_pure_packed": [_defined_only]}
