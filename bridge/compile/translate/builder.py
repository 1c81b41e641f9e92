"""Graph builder: operands in, layout-agnostic loop IR nodes out; translations by operator name."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from tvm.tirx import FloatImm, IntImm

from autodiff.extents import Dim, Extent, from_tir, same
from autodiff.ir import Constant, Expr, ShapeExpr, Tuple, Var, compute_type, dtype, shape
from bridge.base.devices import HOST
from bridge.base.torch_internals import VF
from bridge.compile.codegen.pointwise import identity
from bridge.compile.loop_ir import views
from bridge.compile.loop_ir.graph import (
    Dense,
    LayoutAgnostic,
    Node,
    Operand,
    Pointwise,
    Positions,
    Reduction,
    Scalar,
    Shaped,
    Value,
    whole,
)
from bridge.compile.schedule.limits import Rules

__all__ = ["TRANSLATIONS", "Builder", "Translation", "number", "numbers", "register"]

Translation = Callable[[Any, Any], Any]
"""``(builder, call) -> operand``; a list for a tuple-typed call, ``NotImplemented`` if it does not apply."""

TRANSLATIONS: dict[str, Translation] = {}
"""Relax operators (``"relax.add"``) or library functions (``"library.embedding"``) → translation."""


def register(*names: str) -> Callable[[Translation], Translation]:
    """Register the translation of Relax operators (``"relax.add"``) or library functions (``"library.embedding"``)."""

    def decorate(function: Translation) -> Translation:
        for name in names:
            TRANSLATIONS[name] = function
        return function

    return decorate


def number(expr: Expr) -> Dim | float:
    """The Python number of a literal argument, or its extent. ``TypeError`` for any other expression."""
    if isinstance(expr, IntImm | FloatImm):
        return expr.value
    if isinstance(expr, Constant) and not shape(expr):
        return expr.value.numpy().item()
    if isinstance(expr, int | float):
        return expr
    try:
        return from_tir(expr)
    except ValueError as error:
        raise TypeError(f"wanted a number known at compile time or an extent, got {expr}") from error


def numbers(expr: Expr) -> list[Dim]:
    """The integers of a literal tuple or shape."""
    fields = expr.values if isinstance(expr, ShapeExpr) else expr.fields if isinstance(expr, Tuple) else expr
    return [int(each) if isinstance(each, float) else each for each in map(number, fields)]


class Builder:
    """Collects the nodes of one function.

    Attributes:
        rules: the backend's reduction order and profitability rules.
        env: Relax variables to operands (lists for tuples).
        later: thunks of operands to be made at the first use, for short lifetimes.
        hint: the name of new values.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.env: dict[Var, Operand | Scalar | list] = {}
        self.later: dict[Var, Callable[[], Operand]] = {}
        self.nodes: list[Node | LayoutAgnostic] = []
        self.constants: dict[Value, torch.Tensor | Positions] = {}
        self._literals: dict[Constant, Operand | Scalar] = {}
        self._literals_as_tensors: dict[Hashable, Operand] = {}
        self.hint = "t"

    def get(self, expr: Expr) -> Operand | Scalar | list:
        """The operand of a variable, a constant or a tuple of variables and constants."""
        if isinstance(expr, Var):
            if expr in self.later:
                self.env[expr] = self.later.pop(expr)()
            return self.env[expr]
        if isinstance(expr, Constant):
            if expr not in self._literals:
                self._literals[expr] = self._literal(expr)
            return self._literals[expr]
        if isinstance(expr, Tuple):
            return [self.get(field) for field in expr.fields]
        raise TypeError(f"wanted a variable, a constant or a tuple of them as an argument, got {expr}")

    def _literal(self, constant: Constant) -> Operand | Scalar:
        # numpy has no bfloat16, DLPack does. The clone makes torch own the memory.
        tensor = torch.from_dlpack(constant.value).clone()
        if tensor.numel() == 1:
            return Scalar(tensor.item(), dtype(constant), shape(constant))
        return self.constant(tensor.contiguous())

    def constant(self, tensor: torch.Tensor) -> Operand:
        """A tensor embedded in the program."""
        value = Value(
            f"const{len(self.constants)}", tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), "constant"
        )
        self.constants[value] = tensor
        return whole(value)

    def positions(
        self, start: Dim | float, stop: Dim | float, step: Dim | float, count: Dim, element_type: str
    ) -> Operand:
        """A constant: ``count`` numbers from ``start`` to ``stop`` by ``step``."""
        if not any(isinstance(number, Extent) for number in (start, stop, step)):
            return self.constant(VF.arange(start, stop, step, dtype=getattr(torch, element_type), device=HOST))
        value = Value(f"const{len(self.constants)}", (count,), element_type, "constant")
        self.constants[value] = Positions(start, stop, step, element_type)
        return whole(value)

    def fresh(self, extents: Sequence[Dim], element_type: str) -> Value:
        """A new value, for a node's result."""
        return Value(self.hint, tuple(extents), element_type)

    def add(self, node: Node | LayoutAgnostic) -> None:
        self.nodes.append(node)

    def pointwise(self, op: str, operands: Sequence[Operand | Scalar], element_type: str) -> Operand:
        """``op`` on operands broadcast against each other."""
        extents = views.broadcast(*(operand.shape for operand in operands))
        out = self.fresh(extents, element_type)
        self.add(Pointwise(op, tuple(self.expand(operand, extents) for operand in operands), out))
        return whole(out)

    def cast(self, operand: Operand | Scalar, element_type: str) -> Operand | Scalar:
        """``operand`` as another element type; itself if it has that type."""
        if operand.dtype == element_type:
            return operand
        if isinstance(operand, Scalar) and not isinstance(operand.number, Extent):
            number = VF.tensor(operand.number, dtype=getattr(torch, operand.dtype), device=HOST)
            cast = number.to(getattr(torch, element_type))
            return Scalar(cast.item(), element_type, operand.shape)
        return self.pointwise("astype", [operand], element_type)

    def reduce(self, op: str, operand: Operand | Scalar, axes: Sequence[int], element_type: str) -> Operand:
        """Reduce over ``axes`` without keeping them; half types are accumulated in float32 and rounded once."""
        operand = self.dense(operand) if isinstance(operand, Scalar) else operand
        axes = {axis % len(operand.shape) for axis in axes} if operand.shape else set()
        remaining = [extent for axis, extent in enumerate(operand.shape) if axis not in axes]
        if not axes:
            return self.cast(operand, element_type)
        if same(operand.view.numel, 0):
            # eager has no max or min of an empty axis; its softmax of one has no elements, so nothing reads this fill
            fill = 0 if any(same(extent, 0) for extent in remaining) else identity(op, element_type)
            return self.dense(Scalar(fill, element_type, tuple(remaining)))
        stages = self.rules.order.stages(operand.shape, axes)
        if not stages:
            return self.reshape(self.cast(operand, element_type), remaining)
        for left, (outer, length, inner) in zip(reversed(range(len(stages))), stages, strict=True):
            accumulated = compute_type(element_type) if left else element_type
            out = self.fresh((outer * inner,) if left else remaining, accumulated)
            self.add(Reduction(op, operand, outer, length, inner, out))
            operand = whole(out)
        return operand

    def dense(self, operand: Operand | Scalar) -> Operand:
        """A contiguous value of the operand's elements; a literal becomes a tensor, once."""
        if isinstance(operand, Operand):
            out = self.fresh(operand.shape, operand.dtype)
            self.add(Dense(operand, out))
            return whole(out)
        key = operand, str(operand.number)  # 0.0 equals -0.0
        if key not in self._literals_as_tensors:
            self._literals_as_tensors[key] = self.pointwise("copy", [operand], operand.dtype)
        return self._literals_as_tensors[key]

    def expand(self, operand: Operand | Scalar, extents: Sequence[Dim]) -> Operand | Scalar:
        if isinstance(operand, Scalar):
            return Scalar(operand.number, operand.dtype, tuple(extents))
        return Operand(operand.value, views.expand(operand.view, extents))

    def broadcast(self, operand: Operand | Scalar, extents: Sequence[Dim]) -> Operand | Scalar:
        """:meth:`expand` as a node of its own."""
        if isinstance(operand, Scalar):
            return self.expand(operand, extents)
        return self._shaped(operand, extents, views.expand, tuple(extents))

    def reshape(self, operand: Operand | Scalar, extents: Sequence[Dim]) -> Operand | Scalar:
        if isinstance(operand, Scalar):
            return Scalar(operand.number, operand.dtype, tuple(extents))
        return self._shaped(operand, extents, views.reshape, tuple(extents))

    def permute(self, operand: Operand | Scalar, axes: Sequence[int] | None) -> Operand | Scalar:
        """Dimensions in another order; ``None`` reverses them."""
        order = None if axes is None else tuple(axis % len(operand.shape) for axis in axes)
        extents = views.permute(views.dense(operand.shape), order).shape
        if isinstance(operand, Scalar):
            return Scalar(operand.number, operand.dtype, extents)
        return self._shaped(operand, extents, views.permute, order)

    def slice(self, operand: Operand | Scalar, axis: int, begin: Dim, end: Dim, step: int = 1) -> Operand | Scalar:
        """``operand[..., begin:end:step, ...]`` with ``0 <= begin`` and ``step > 0``."""
        extents = views.slice_view(views.dense(operand.shape), axis, begin, end, step).shape
        if isinstance(operand, Scalar):
            return Scalar(operand.number, operand.dtype, extents)
        return self._shaped(operand, extents, views.slice_view, axis, begin, end, step)

    def _shaped(self, operand: Operand, extents: Sequence[Dim], function: Callable, *arguments: object) -> Operand:
        out = self.fresh(extents, operand.dtype)
        self.add(Shaped(function, arguments, operand, out))
        return whole(out)
