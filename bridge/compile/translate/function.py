"""Translation: a Relax function in flat form → the loop graph.

Every Relax operator has a *translation*, registered by name: a function ``(builder, call) -> operand`` (a list of
operands for a tuple-typed call). Arithmetic becomes point-wise nodes and reductions
(:mod:`bridge.compile.translate.arithmetic`), gathers and similar operators become library calls
(:mod:`bridge.compile.translate.libcalls`). Layouts stay open: shape operations, matrix products
and concatenations become layout-agnostic nodes, see :mod:`bridge.compile.passes.choose_layouts`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from autodiff.ir import (
    Constant,
    Expr,
    Function,
    TensorType,
    Tuple,
    TupleGetItem,
    TupleType,
    Var,
    bindings,
    dtype,
    extents_of,
    inverse,
    library_name,
    op_name,
    results,
    shape,
)
from bridge.compile.loop_ir.graph import Graph, Operand, Result, Scalar, Value, whole
from bridge.compile.schedule.limits import Rules
from bridge.compile.translate.builder import TRANSLATIONS, Builder
from bridge.compile.translate.shapes import DrawnMask, drawn_mask, state_parameter

__all__ = ["translate"]


def translate(
    func: Function,
    rules: Rules,
    drawn: Mapping[int, DrawnMask] | None = None,
    orders: Mapping[int, tuple[int, ...]] | None = None,
) -> Graph:
    """The layout-agnostic loop graph (:mod:`bridge.compile.loop_ir.graph`) of a function in flat form.

    ``drawn``: place → dropout mask that kernels recompute; the generator's state replaces it as a parameter.
    ``orders``: place → memory order of a parameter, see :class:`~bridge.compile.options.CompileOptions`.

    ``NotImplementedError`` names an operator without a translation for its operands.
    """
    builder = Builder(rules)
    drawn, orders = drawn or {}, orders or {}
    params = [_parameter(builder, var, drawn.get(i), orders.get(i)) for i, var in enumerate(func.params)]
    for var, value in bindings(func):
        if var not in builder.env:
            _bind(builder, var, value)
    outputs = [_result(builder, builder.get(output), output) for output in results(func)]
    return Graph(params, builder.constants, builder.nodes, outputs)


def _parameter(builder: Builder, var: Var, mask: DrawnMask | None, order: tuple[int, ...] | None) -> Value:
    """The program's parameter for a function's: the tensor, the tensor in memory order, or the generator's state."""
    name = builder.hint = str(var.name)
    if mask is None and order is not None:
        value = Value(name, tuple(shape(var)[axis] for axis in order), dtype(var), "param", order)
        builder.env[var] = builder.permute(whole(value), inverse(order))
        return value
    if mask is None:
        value = Value(name, shape(var), dtype(var), "param")
        builder.env[var] = whole(value)
        return value
    state = state_parameter(name)
    builder.later[var] = partial(drawn_mask, builder, mask, state, shape(var))
    return state


def _bind(builder: Builder, var: Var, value: Expr) -> None:
    builder.hint = str(var.name)
    builder.env[var] = _translated(builder, value)
    _check(var, builder.env[var], value)


def _translated(builder: Builder, value: Expr) -> Operand | Scalar | list:
    if isinstance(value, Var | Constant | Tuple):
        return builder.get(value)
    if isinstance(value, TupleGetItem):
        return builder.get(value.tuple_value)[value.index]
    name = op_name(value)
    if name is None:
        raise NotImplementedError(f"cannot compile the binding {value}: wanted a call of a Relax operator")
    library = library_name(value)
    translation = TRANSLATIONS.get(library or name)
    if translation is not None:
        result = translation(builder, value)
        if result is not NotImplemented:
            return result
    if library is not None or name == "relax.call_pure_packed":
        known = ", ".join(sorted(n for n in TRANSLATIONS if n.startswith("library.")))
        raise NotImplementedError(f"no library function {library or value.args[0]} is bound; bound are: {known}")
    raise NotImplementedError(f"no kernel for {value}: {name} has no translation for these operands")


def _check(var: Var, result: Operand | Scalar | list, value: Expr) -> None:
    """Raises ``AssertionError`` unless a translation's result has the type that Relax inferred."""
    if isinstance(var.ty, TupleType):
        if not isinstance(result, list) or len(result) != len(var.ty.fields):
            raise AssertionError(f"{value} gives a tuple of {len(var.ty.fields)}, its translation gave {result}")
        types, fields = list(var.ty.fields), result
    else:
        types, fields = [var.ty], [result]
    for ty, field in zip(types, fields, strict=True):
        if not isinstance(ty, TensorType) or ty.shape is None:
            continue
        wanted = (extents_of(ty), str(ty.dtype))
        if (field.shape, field.dtype) != wanted:
            raise AssertionError(f"{value} has type {wanted}, its translation has {(field.shape, field.dtype)}")


def _result(builder: Builder, operand: Operand | Scalar, output: Expr) -> Operand:
    if isinstance(output, Var):
        builder.hint = str(output.name)
    out = builder.fresh(operand.shape, operand.dtype)
    builder.add(Result(operand, out))
    return whole(out)
