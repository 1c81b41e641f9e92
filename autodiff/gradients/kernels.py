"""Gradients of library kernels that have a backward kernel of their own (conventions: :mod:`autodiff.library`)."""

from __future__ import annotations

import math

from tvm import relax
from tvm.relax import op

from autodiff.gradients.registry import Emit, GradientRule, library_gradient
from autodiff.gradients.tools import const
from autodiff.ir import Call, Expr, ShapeExpr, TupleGetItem, Var, shape
from autodiff.library import call as library_call

__all__ = []


def _extents(x: Expr) -> ShapeExpr:
    return ShapeExpr(list(shape(x)))


def _rest(call: Call) -> list[None]:
    return [None] * (len(call.args) - 1)


@library_gradient("library.convolution")
def convolution(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
    """dx = g convolved with the transposed kernel, dweight = x correlated with g"""
    x, weight, *geometry = call.args
    return [
        library_call("convolution_backward_input", [g, weight, *geometry], x.ty),
        library_call("convolution_backward_weight", [g, x, *geometry], weight.ty),
        *[None] * len(geometry),
    ]


def _max_pool(name: str) -> GradientRule:
    def rule(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
        """dx = zeros with g added at the position of each window's maximum"""
        x, *geometry = call.args
        args = [emit(TupleGetItem(g, 0)), x, emit(TupleGetItem(y, 1)), *geometry]
        return [library_call(name + "_backward", args, x.ty), *_rest(call)]

    return rule


def _avg_pool(name: str) -> GradientRule:
    def rule(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
        """dx = g spread evenly over each window"""
        x, *geometry = call.args
        return [library_call(name + "_backward", [g, _extents(x), *geometry], x.ty), *_rest(call)]

    return rule


for _name in ("max_pool", "adaptive_max_pool"):
    library_gradient(f"library.{_name}")(_max_pool(_name))
for _name in ("avg_pool", "adaptive_avg_pool"):
    library_gradient(f"library.{_name}")(_avg_pool(_name))


@library_gradient("library.index")
def index(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
    """dx = zeros with g added at the indices"""
    x, dims, indices = call.args
    return [library_call("index_backward", [g, _extents(x), dims, indices], x.ty), None, None]


@library_gradient("library.index_put")
def index_put(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
    """dx = g, zero where overwritten; dvalues = g at the indices"""
    x, values, dims, indices, accumulate = call.args
    dvalues = library_call("index", [g, dims, indices], values.ty)
    if int(accumulate.value):
        return [g, dvalues, None, None, None]
    zeros = emit(op.zeros(shape(values), str(values.ty.dtype)))
    dx = library_call("index_put", [g, zeros, dims, indices, relax.prim_value(0)], x.ty)
    return [dx, dvalues, None, None, None]


@library_gradient("library.sort", "library.topk", "library.median", "library.kthvalue", "library.mode")
def sort(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
    """dx = zeros with g added where each value came from; the axis is the second argument"""
    x, axis = call.args[:2]
    zeros = emit(op.zeros(shape(x), str(x.ty.dtype)))
    grad, indices = emit(TupleGetItem(g, 0)), emit(TupleGetItem(y, 1))
    return [op.scatter_elements(zeros, indices, grad, int(axis.value), "add"), *_rest(call)]


@library_gradient("library.cummax", "library.cummin")
def cumulative_extremum(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
    """dx = zeros with g added where each value came from; the axis is the second argument"""
    return sort(call, y, g, emit)


@library_gradient("library.log1p")
def log1p(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr]:
    """dx = g / (1 + x)"""
    (x,) = call.args
    return [op.divide(g, emit(op.add(x, const(1, x))))]


@library_gradient("library.expm1")
def expm1(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr]:
    """dx = g (y + 1)"""
    return [op.multiply(g, emit(op.add(y, const(1, y))))]


@library_gradient("library.erfc")
def erfc(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr]:
    """dx = -2 / sqrt(pi) g exp(-x^2)"""
    (x,) = call.args
    bell = emit(op.exp(emit(op.negative(emit(op.multiply(x, x))))))
    return [op.multiply(g, emit(op.multiply(bell, const(-2 / math.sqrt(math.pi), x))))]
