"""Gradients of operators that the library computes whole: its own derivatives."""

from __future__ import annotations

from tvm import relax

from autodiff.gradients.registry import Emit, library_gradient
from autodiff.ir import Call, Expr, ShapeExpr, TensorType, TupleGetItem, TupleType, Var, is_float
from autodiff.library import call as library_call

__all__ = []


@library_gradient("library.operator")
def operator(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
    """dx_i = the library's vector-Jacobian product, a call for each tensor: one can be had without the others"""
    name, arguments, *tensors = call.args
    if isinstance(y.ty, TupleType):
        outputs = [index for index, field in enumerate(y.ty.fields) if "float" in str(field.dtype)]
        grads = [emit(TupleGetItem(g, index)) for index in outputs]
    else:
        outputs, grads = [0], [g]
    partials = []
    for index, tensor in enumerate(tensors):
        args = [name, arguments, relax.prim_value(index), ShapeExpr(outputs), *tensors, *grads]
        is_followed = isinstance(tensor.ty, TensorType) and is_float(tensor)
        partials.append(library_call("operator_vjp", args, tensor.ty) if is_followed else None)
    return [None, None, *partials]


@library_gradient("library.custom_gradient")
def custom_gradient(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
    """dx_i = the user's own gradient of input i, given the gradients of the outputs (:mod:`autodiff.own_gradients`)"""
    count, *rest = call.args
    inputs, rest = rest[: int(count.value)], rest[int(count.value) :]
    gradients, tangents = rest[: len(inputs)], rest[len(inputs) :]
    upstream = [emit(TupleGetItem(g, index)) for index in range(len(tangents))]
    partials = [library_call("given", [gradient, *tangents, *upstream], gradient.ty) for gradient in gradients]
    return [None, *partials, *[None] * (len(gradients) + len(tangents))]


@library_gradient("library.with_derivative")
def with_derivative(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
    """dx = 0, dlinear = g: the value of the first with the derivative of the second"""
    return [None, g]
