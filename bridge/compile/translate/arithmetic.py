"""Arithmetic operators → point-wise nodes and reductions, composites spelled out.

A composite (softmax, LayerNorm, GELU, …) on a half type is computed in float32 and rounded once, as eager torch does.
"""

from __future__ import annotations

import math

from autodiff.extents import Dim, Extent
from autodiff.ir import Call, axes_of, compute_type, dtype, shape
from bridge.compile.codegen.pointwise import RULES
from bridge.compile.loop_ir import views
from bridge.compile.loop_ir.graph import Operand, Scalar
from bridge.compile.translate.builder import Builder, number, register

__all__: list[str] = []

_DIRECT = [name for name in RULES if name not in ("copy", "concat", "where", "log1p", "expm1", "power")]

_FLOAT_ONLY = frozenset(
    "exp log tanh erf sigmoid sqrt rsqrt floor ceil trunc round sin cos tan asin acos atan atan2 sinh cosh asinh acosh"
    " atanh isnan isinf isfinite".split()
)

_NOT_FOR_BOOL = frozenset("maximum minimum negative abs sign subtract divide less".split())


@register(*(f"relax.{name}" for name in _DIRECT))
def _direct(builder: Builder, call: Call) -> Operand:
    name = str(call.op.name).removeprefix("relax.")
    operands = [builder.get(arg) for arg in call.args]
    if len({operand.dtype for operand in operands}) > 1:
        return NotImplemented
    if "float" not in operands[0].dtype and name in _FLOAT_ONLY:
        return NotImplemented
    if name.startswith("logical_"):
        operands = [builder.cast(operand, "bool") for operand in operands]
    if operands[0].dtype == "bool" and name in _NOT_FOR_BOOL:
        return NotImplemented
    return builder.pointwise(name, operands, dtype(call))


@register("relax.power")
def _power(builder: Builder, call: Call) -> Operand:
    x, y = (builder.get(arg) for arg in call.args)
    if "float" not in x.dtype:
        return NotImplemented
    exponent = y.number if isinstance(y, Scalar) and not isinstance(y.number, Extent) else None
    extents = views.broadcast(x.shape, y.shape)
    c = CompositeEmitter(builder, call)
    base = c.widen(builder.expand(x, extents))
    # torch expands the same exponents.
    if exponent == 2:
        return c.narrow(c("multiply", base, base))
    if exponent == 3:
        return c.narrow(c("multiply", c("multiply", base, base), base))
    if exponent == -1:
        return c.narrow(c("divide", c.const(1), base))
    if exponent == -2:
        return c.narrow(c("divide", c.const(1), c("multiply", base, base)))
    if exponent == 0.5:
        return c.narrow(c("sqrt", base))
    if exponent == -0.5:
        return c.narrow(c("divide", c.const(1), c("sqrt", base)))
    return builder.pointwise("power", [x, y], dtype(call))


@register("relax.where")
def _where(builder: Builder, call: Call) -> Operand:
    condition, then, otherwise = (builder.get(arg) for arg in call.args)
    condition = builder.cast(condition, "bool")
    return builder.pointwise("where", [condition, then, otherwise], dtype(call))


@register("relax.astype")
def _astype(builder: Builder, call: Call) -> Operand | Scalar:
    return builder.cast(builder.get(call.args[0]), dtype(call))


class CompositeEmitter:
    """Emits the steps of a composite operator in the compute type of its result."""

    def __init__(self, builder: Builder, call: Call) -> None:
        self.builder = builder
        self.result = dtype(call)
        self.type = compute_type(self.result)

    def __call__(self, op: str, *operands: Operand | Scalar) -> Operand:
        return self.builder.pointwise(op, operands, self.type)

    def const(self, value: Dim | float) -> Scalar:
        return Scalar(value, self.type)

    def widen(self, operand: Operand | Scalar) -> Operand | Scalar:
        return self.builder.cast(operand, self.type)

    def narrow(self, operand: Operand | Scalar) -> Operand | Scalar:
        return self.builder.cast(operand, self.result)

    def reduce(self, op: str, operand: Operand, axes: list[int]) -> Operand:
        """Reduces ``axes`` to extent 1."""
        axes = [axis % len(operand.shape) for axis in axes]
        extents = [1 if axis in axes else extent for axis, extent in enumerate(operand.shape)]
        return self.builder.reshape(self.builder.reduce(op, operand, axes, self.type), extents)


@register("relax.sum", "relax.prod", "relax.max", "relax.min")
def _reduction(builder: Builder, call: Call) -> Operand | Scalar:
    operand = builder.get(call.args[0])
    if operand.dtype == "bool":
        return NotImplemented
    name = str(call.op.name).removeprefix("relax.")
    reduced = builder.reduce(name, operand, axes_of(call), dtype(call))
    return builder.reshape(reduced, shape(call))


@register("relax.mean")
def _mean(builder: Builder, call: Call) -> Operand | Scalar:
    c = CompositeEmitter(builder, call)
    operand = builder.get(call.args[0])
    if "float" not in operand.dtype:
        return NotImplemented
    axes, operand = axes_of(call), c.widen(operand)
    count = math.prod(operand.shape[axis] for axis in axes)
    result = c("divide", c.reduce("sum", operand, axes), c.const(count))
    return builder.reshape(c.narrow(result), shape(call))


@register("relax.nn.softmax", "relax.nn.log_softmax")
def _softmax(builder: Builder, call: Call) -> Operand | Scalar:
    c = CompositeEmitter(builder, call)
    x = c.widen(builder.get(call.args[0]))
    axes = [int(call.attrs.axis) % len(x.shape)]
    shifted = c("subtract", x, c.reduce("max", x, axes))
    powers = c("exp", shifted)
    total = c.reduce("sum", powers, axes)
    if call.op.name == "relax.nn.softmax":
        return c.narrow(c("multiply", powers, c("divide", c.const(1), total)))
    return c.narrow(c("subtract", shifted, c("log", total)))


@register("relax.nn.relu")
def _relu(builder: Builder, call: Call) -> Operand:
    x = builder.get(call.args[0])
    return builder.pointwise("maximum", [Scalar(0, x.dtype), x], dtype(call))  # of two zeros, the second


@register("relax.clip")
def _clip(builder: Builder, call: Call) -> Operand:
    x = builder.get(call.args[0])
    low, high = (number(arg) for arg in call.args[1:])
    bounds = [bound for bound in (low, high) if not isinstance(bound, Extent)]
    if "float" not in x.dtype and not all(float(bound).is_integer() for bound in bounds):
        return NotImplemented
    x = builder.pointwise("maximum", [Scalar(low, x.dtype), x], x.dtype)  # of two zeros, the second
    return builder.pointwise("minimum", [Scalar(high, x.dtype), x], dtype(call))


@register("relax.nn.gelu")
def _gelu(builder: Builder, call: Call) -> Operand | Scalar:
    c = CompositeEmitter(builder, call)
    x = c.widen(builder.get(call.args[0]))
    twice = c("add", c("erf", c("multiply", x, c.const(math.sqrt(0.5)))), c.const(1))
    return c.narrow(c("multiply", x, c("multiply", twice, c.const(0.5))))


@register("relax.nn.gelu_tanh")
def _gelu_tanh(builder: Builder, call: Call) -> Operand | Scalar:
    c = CompositeEmitter(builder, call)
    x = c.widen(builder.get(call.args[0]))
    cube = c("multiply", c("multiply", x, x), x)
    inner = c("multiply", c("add", x, c("multiply", cube, c.const(0.044715))), c.const(math.sqrt(2 / math.pi)))
    return c.narrow(c("multiply", c("multiply", x, c.const(0.5)), c("add", c("tanh", inner), c.const(1))))


@register("relax.nn.silu")
def _silu(builder: Builder, call: Call) -> Operand | Scalar:
    c = CompositeEmitter(builder, call)
    x = c.widen(builder.get(call.args[0]))
    return c.narrow(c("multiply", x, c("sigmoid", x)))


@register("library.log1p", "library.expm1")
def _elementary(builder: Builder, call: Call) -> Operand | Scalar:
    c = CompositeEmitter(builder, call)
    name = str(call.args[0].global_symbol).removeprefix("library.")
    return c.narrow(c(name, c.widen(builder.get(call.args[1]))))


@register("relax.arange")
def _arange(builder: Builder, call: Call) -> Operand:
    start, stop, step = (number(arg) for arg in call.args)
    return builder.positions(start, stop, step, *shape(call), dtype(call))


@register("library.extent")
def _extent(builder: Builder, call: Call) -> Scalar:
    return Scalar(number(call.args[1]), dtype(call))
