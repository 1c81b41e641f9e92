"""Gradients of library functions that pick elements (sorting, extrema along an axis) or act on each (atan2, fmod)."""

from __future__ import annotations

from tvm import relax
from tvm.relax import op

from autodiff.gradients.registry import Emit, library_gradient
from autodiff.gradients.tools import const
from autodiff.ir import Call, Expr, TupleGetItem, Var, dtype, shape
from autodiff.library import call as library_call

__all__ = []


@library_gradient("library.index_put")
def index_put(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
    """dx = g, zero where overwritten; dvalues = g at the indices"""
    x, values, dims, indices, accumulate = call.args
    dvalues = library_call("index", [g, dims, indices], values.ty)
    if int(accumulate.value):
        return [g, dvalues, None, None, None]
    zeros = emit(op.zeros(shape(values), dtype(values)))
    dx = library_call("index_put", [g, zeros, dims, indices, relax.prim_value(0)], x.ty)
    return [dx, dvalues, None, None, None]


_PICKING = ("sort", "topk", "kthvalue", "cummax", "cummin")
_PICKING_ALONG = ("max_dim", "min_dim", "median_dim", "nanmedian_dim", "mode_dim")


@library_gradient(*(f"library.{name}" for name in (*_PICKING, *_PICKING_ALONG)))
def picking(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
    """dx = zeros with g added where each value came from, which is the second result"""
    x, axis, *rest = call.args
    zeros = emit(op.zeros(shape(x), dtype(x)))
    grad, positions = emit(TupleGetItem(g, 0)), emit(TupleGetItem(y, 1))
    return [op.scatter_elements(zeros, positions, grad, int(axis.value), "add"), None, *[None] * len(rest)]


@library_gradient("library.atan2")
def atan2(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr]:
    """da = g b / (a^2 + b^2); db = -g a / (a^2 + b^2); 0 where both are 0"""
    a, b = call.args
    square = emit(emit(a * a) + emit(b * b))
    inverse = emit(op.where(op.equal(square, const(0, a)), const(0, a), const(1, a) / square))
    return [emit(g * b) * inverse, emit(g * op.negative(a)) * inverse]


def _modulo(name: str, quotient: str) -> None:
    @library_gradient(f"library.{name}")
    def rule(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr]:
        """da = g; db = -g q, where q is the quotient, rounded towards zero or down"""
        return [g, op.negative(g) * emit(library_call(quotient, list(call.args), y.ty))]


_modulo("fmod", "divide_trunc")
_modulo("remainder", "divide_floor")


@library_gradient("library.divide_trunc", "library.divide_floor")
def rounded_quotient(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
    """da = db = 0"""
    return [None, None]


@library_gradient("library.binary_cross_entropy")
def binary_cross_entropy(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr]:
    """dx = g (x - t) / max(x (1 - x), 1e-12); dt = g (log(1 - x) - log(x))"""
    x, target = call.args
    rest = emit(const(1, x) - x)
    bounded = emit(op.maximum(emit(x * rest), const(1e-12, x)))
    difference = emit(emit(op.log(rest)) - emit(op.log(x)))
    return [emit(g * emit(x - target)) / bounded, g * difference]
