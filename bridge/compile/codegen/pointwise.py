"""Point-wise rules: one per operator, TIR expressions of the operands → a TIR expression of the result.

A rule gets its arguments in their *compute type* (float32 for half types) and returns the result in the result's
compute type; loops round to the stored type after every operator, as eager torch does. Where torch and TVM differ (nan
in ``maximum``, half-way cases of ``round``), torch's meaning is taken. Products and sums are made as nodes, because
TVM's operators fold ``x * 0.0`` to ``0.0``, which is wrong for nan, inf and negative numbers.

Reduction steps in code: identity, combination, folding of a vector's lanes into one. The order of the steps is
decided by :mod:`bridge.compile.schedule.order`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tvm import tirx
from tvm.tirx import Expr

from autodiff.ops import having
from bridge.compile.codegen import fastmath, philox
from bridge.compile.codegen.emit import Emitter, different, element_type

__all__ = ["EXPENSIVE", "MASKS", "RULES", "combine", "fold_lanes", "identity", "maximum", "minimum"]

Rule = Callable[..., Expr]

MASKS = {f"dropout_mask_{width}": width for width in philox.WIDTHS}
"""Operators that recompute dropout masks, by the load width of eager's kernel; operands: see :func:`philox.kept`."""

EXPENSIVE = frozenset((*(name.split(".")[-1] for name in having("slow")), "normal_cdf", "gaussian", *MASKS))
"""Operators whose result a kernel caches in a row buffer rather than recomputes."""


def maximum(e: Emitter, a: Expr, b: Expr) -> Expr:
    """The larger operand; nan if either is nan (torch)."""
    a, b = e.bind(a), e.bind(b)
    if "float" not in element_type(a):
        return tirx.Select(tirx.GT(a, b), a, b)
    return e.larger(a, b)


def minimum(e: Emitter, a: Expr, b: Expr) -> Expr:
    """The smaller operand; nan if either is nan (torch)."""
    a, b = e.bind(a), e.bind(b)
    if "float" not in element_type(a):
        return tirx.Select(tirx.LT(a, b), a, b)
    return e.smaller(a, b)


def _abs(e: Emitter, x: Expr) -> Expr:
    x, dtype = e.bind(x), element_type(x)
    if dtype == "float32":
        return e.reinterpret(tirx.bitwise_and(e.reinterpret(x, "int32"), e.const(2**31 - 1, "int32")), dtype)
    if dtype == "float64":
        return e.reinterpret(tirx.bitwise_and(e.reinterpret(x, "int64"), e.const(2**63 - 1, "int64")), dtype)
    zero = e.const(0, dtype)
    return x if dtype.startswith("uint") else e.select(x < zero, zero - x, x)


def _negative(e: Emitter, x: Expr) -> Expr:
    dtype = element_type(x)
    return x * e.const(-1, dtype) if "float" in dtype else e.const(0, dtype) - x


def _sign(e: Emitter, x: Expr) -> Expr:
    x, dtype = e.bind(x), element_type(x)
    zero, one = e.const(0, dtype), e.const(1, dtype)
    return e.select(x > zero, one, zero) - e.select(x < zero, one, zero)


def _bits(boolean: Rule, other: Rule) -> Rule:
    """Selects a rule by type: ``boolean`` for bool, which is one bit inside kernels, ``other`` for numbers."""
    return lambda e, *args: (boolean if element_type(args[0]) == "bool" else other)(e, *args)


def _plain(function: Callable[..., Expr]) -> Rule:
    """The rule of a TIR node that is the same on every target."""
    return lambda e, *args: function(*args)


def _called(of: str, name: str) -> Rule:
    """The rule of a function that an emitter's method calls by name."""
    return lambda e, *args: getattr(e, of)(name, *args)


def _xor(a: Expr, b: Expr) -> Expr:
    return tirx.Or(tirx.And(a, tirx.Not(b)), tirx.And(tirx.Not(a), b))


RULES: dict[str, Rule] = {
    "add": _bits(_plain(tirx.Or), _plain(tirx.Add)),
    "subtract": _plain(tirx.Sub),
    "multiply": _bits(_plain(tirx.And), _plain(tirx.Mul)),
    "divide": lambda e, a, b: tirx.Div(a, b) if "float" in element_type(a) else tirx.truncdiv(a, b),
    "power": _called("libm", "pow"),
    "maximum": maximum,
    "minimum": minimum,
    "negative": _negative,
    "abs": _abs,
    "sign": _sign,
    "square": lambda e, x: (lambda v: v * v)(e.bind(x)),
    **{each.__name__: each for each in (fastmath.exp, fastmath.log, fastmath.log1p, fastmath.expm1, fastmath.tanh)},
    **{each.__name__: each for each in (fastmath.erf, fastmath.sigmoid, fastmath.normal_cdf, fastmath.gaussian)},
    "rsqrt": lambda e, x: e.const(1, element_type(x)) / e.math("sqrt", x),
    **{name: _called("math", name) for name in ("sqrt", "floor", "ceil", "trunc")},
    "round": _called("math", "roundeven"),
    **{name: _called("libm", name) for name in "sin cos tan asin acos atan atan2 sinh cosh asinh acosh atanh".split()},
    "equal": _bits(_plain(lambda a, b: tirx.Not(_xor(a, b))), _plain(tirx.EQ)),
    "not_equal": _bits(_plain(_xor), _plain(different)),
    "less": _plain(tirx.LT),
    "less_equal": _plain(tirx.LE),
    "greater": _plain(tirx.GT),
    "greater_equal": _plain(tirx.GE),
    "isnan": lambda e, x: (lambda v: different(v, v))(e.bind(x)),
    "isinf": lambda e, x: tirx.EQ(_abs(e, x), e.const(float("inf"), element_type(x))),
    "isfinite": lambda e, x: _abs(e, x) < e.const(float("inf"), element_type(x)),
    "logical_and": _plain(tirx.And),
    "logical_or": _plain(tirx.Or),
    "logical_xor": _plain(_xor),
    "logical_not": _plain(tirx.Not),
    "bitwise_and": _bits(_plain(tirx.And), _plain(tirx.bitwise_and)),
    "bitwise_or": _bits(_plain(tirx.Or), _plain(tirx.bitwise_or)),
    "bitwise_xor": _bits(_plain(_xor), _plain(tirx.bitwise_xor)),
    "bitwise_not": _bits(_plain(tirx.Not), _plain(tirx.bitwise_not)),
    "where": lambda e, c, a, b: e.select(c, a, b),
    **{name: _plain(lambda x: x) for name in ("copy", "pad", "concat")},  # of a section's operand
    **{name: lambda e, *args, width=width: philox.kept(e, width, *args) for name, width in MASKS.items()},
}


def identity(op: str, dtype: str) -> float:
    """The initial value of a reduction; for integer ``max`` and ``min``, the type's least or largest number."""
    if op in ("sum", "prod"):
        return 0 if op == "sum" else 1
    if "float" in dtype:
        return -math.inf if op == "max" else math.inf
    bound = tirx.min_value(dtype) if op == "max" else tirx.max_value(dtype)
    return int(bound.value)


def combine(e: Emitter, op: str, a: Expr, b: Expr) -> Expr:
    """One reduction step; ``a`` is the accumulator."""
    match op:
        case "sum":
            return tirx.Add(a, b)
        case "prod":
            return tirx.Mul(a, b)
        case "max":
            return maximum(e, a, b)
        case "min":
            return minimum(e, a, b)
    raise NotImplementedError(f"no reduction is called {op!r}")


def fold_lanes(e: Emitter, op: str, vector: Expr) -> Expr:
    """Folds a vector into one lane, by halves."""
    lanes = e.lanes
    while lanes > 1:
        lanes //= 2
        vector = e.bind(vector)
        low = e.bind(tirx.Shuffle([vector], list(range(lanes))))
        high = e.bind(tirx.Shuffle([vector], list(range(lanes, 2 * lanes))))
        vector = combine(e, op, low, high)
    return e.bind(vector, element_type(vector)[0])
