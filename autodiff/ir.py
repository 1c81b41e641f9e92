"""Relax IR: TVM's classes under stable names, and helpers on functions in flat form.

All packages import Relax types from this file: upstream renames them (``struct_info`` became ``ty`` in 0.27), and so
the next renaming is one edit. Functions have one shape (*flat form*): a single dataflow block of ``var = value``
bindings in ANF, known shapes (numbers, or extents of a scope), and a flat tuple of variables or constants as result.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, partial

import numpy as np
from tvm import relax
from tvm.ir import Call, DictAttrs, IRModule, Op, StringImm
from tvm.ir import GenericConst as Constant
from tvm.relax import (
    DataflowBlock,
    DataflowVar,
    Expr,
    ExternFunc,
    Function,
    SeqExpr,
    ShapeExpr,
    TensorType,
    Tuple,
    TupleGetItem,
    TupleType,
    Var,
    VarBinding,
)
from tvm.tirx import Add, Cast, FloatImm, FloorDiv, FloorMod, IntImm, Max, Min, Mul, Sub

from autodiff.extents import Dim, from_tir, is_symbol

__all__ = ["VARS", "Call", "Constant", "DataflowBlock", "DataflowVar", "Expr", "ExternFunc", "Function", "IRModule"]
__all__ += ["Op", "Pairs", "SeqExpr", "ShapeExpr", "StringImm", "TensorType", "Tuple", "TupleGetItem", "TupleType"]
__all__ += [
    "Var",
    "VarBinding",
    "axes_of",
    "bindings",
    "build_function",
    "compute_type",
    "dtype",
    "extents_of",
    "inverse",
]
__all__ += ["is_float", "is_transpose", "itemsize", "library_name", "nbytes", "numel", "numpy_value", "op_name"]
__all__ += ["operands", "permutation", "results", "shape", "substitute", "used_vars", "with_operands"]
__all__ += ["with_outputs"]

LIBRARY_PREFIX = "library."
VARS = frozenset({Var, DataflowVar})  # the type of every variable: quicker to look up than to ask isinstance
Pairs = list[tuple[Var, Expr]]
"""Bindings in order: variables and their values."""
_BITS = {"bool": 8}
_INTEGERS = (IntImm, Add, Sub, Mul, FloorDiv, FloorMod, Max, Min, Cast)  # numbers and extents
_LEAVES = frozenset({Constant, ExternFunc, StringImm, FloatImm, ShapeExpr, *_INTEGERS})  # read no variables


def shape(value: Expr) -> tuple[Dim, ...]:
    """The shape of a tensor expression, symbolic extents as :class:`autodiff.extents.Extent`.

    Raises ``ValueError`` if the value is no tensor, or has no known shape.
    """
    ty = value.ty
    extents = ty.shape if isinstance(ty, TensorType) else None
    if not isinstance(extents, ShapeExpr):
        raise ValueError(f"wanted a tensor of known shape, got {value} of type {ty}")
    return tuple([extent.value if type(extent) is IntImm else from_tir(extent) for extent in extents.values[:]])


def extents_of(ty: TensorType) -> tuple[Dim, ...]:
    """The shape in a type of known shape, with extents as in :func:`shape`."""
    return tuple([extent.value if type(extent) is IntImm else from_tir(extent) for extent in ty.shape.values[:]])


def dtype(value: Expr) -> str:
    """The element type of a tensor expression, as in ``"float32"`` or ``"bool"``."""
    return str(value.ty.dtype)


def is_float(value: Expr) -> bool:
    """Whether a value is a tensor of floating point elements (float16, bfloat16, float32, float64)."""
    return isinstance(value.ty, TensorType) and "float" in dtype(value)


def compute_type(element_type: str) -> str:
    """The type in which values of a type are computed: float32 for half types, else the type itself."""
    return "float32" if element_type in ("float16", "bfloat16") else element_type


@cache
def itemsize(element_type: str) -> int:
    """Bytes per element as stored; a ``bool`` is stored as one byte."""
    bits = _BITS.get(element_type)
    if bits is None:
        bits = int("".join(c for c in element_type if c.isdigit()))
    return bits // 8


def numel(value: Expr) -> Dim:
    """Number of elements of a tensor expression."""
    return math.prod(shape(value))


def nbytes(value: Expr) -> Dim:
    """Bytes of a tensor expression when stored densely."""
    return numel(value) * itemsize(dtype(value))


def numpy_value(value: Constant) -> np.ndarray:
    """The number or array that a constant holds."""
    return value.value.numpy()


def op_name(value: Expr) -> str | None:
    """``"relax.add"`` for a call of that operator, ``None`` for anything else."""
    if isinstance(value, Call) and isinstance(value.op, Op):
        return value.op.name
    return None


def permutation(call: Call) -> list[int]:
    """The axes of a ``permute_dims``, non-negative; reversed order if it names none."""
    rank = len(shape(call))
    axes = call.attrs.axes
    return list(range(rank))[::-1] if axes is None else [int(axis) % rank for axis in axes]


def inverse(order: Sequence[int]) -> list[int]:
    """The inverse of a permutation."""
    return [order.index(axis) for axis in range(len(order))]


def is_transpose(value: Expr | None) -> bool:
    """Whether a value exchanges the last two axes of a tensor, and nothing else."""
    rank = len(shape(value.args[0])) if op_name(value) == "relax.permute_dims" else 0
    return rank > 1 and permutation(value) == [*range(rank - 2), rank - 1, rank - 2]


def axes_of(call: Call) -> list[int]:
    """The axes that a reduction reduces, non-negative and sorted; all axes if the call lists none."""
    rank, axes = len(shape(call.args[0])), call.attrs.axis
    return list(range(rank)) if axes is None else sorted(int(axis) % rank for axis in axes)


def library_name(value: Expr) -> str | None:
    """``"library.embedding"`` for a call of that library function (see :mod:`autodiff.library`), else ``None``."""
    if op_name(value) == "relax.call_pure_packed" and isinstance(value.args[0], ExternFunc):
        name = str(value.args[0].global_symbol)
        return name if name.startswith(LIBRARY_PREFIX) else None
    return None


def bindings(func: Function) -> Iterator[tuple[Var, Expr]]:
    """The bindings ``(var, value)`` of a function in flat form, in order."""
    for block in func.body.blocks:
        for binding in block.bindings:
            yield binding.var, binding.value


def results(func: Function) -> list[Expr]:
    """The fields of the flat result tuple of a function in flat form."""
    body = func.body.body
    if isinstance(body, Tuple):
        return list(body.fields)
    value = dict(bindings(func)).get(body)
    if isinstance(value, Tuple):
        return list(value.fields)
    return [body]


def used_vars(value: Expr) -> list[Var]:
    """Every variable that a binding's value reads, in order of first use, each once; an extent is not one."""
    seen: dict[Var, None] = {}
    stack = [value]
    while stack:
        expr = stack.pop()
        kind = type(expr)
        if kind in VARS:
            if not is_symbol(expr):
                seen.setdefault(expr)
        elif kind is Call:
            stack.extend(expr.args[::-1])
            if not isinstance(expr.op, Op):
                stack.append(expr.op)
        elif kind is Tuple:
            stack.extend(expr.fields[::-1])
        elif kind is TupleGetItem:
            stack.append(expr.tuple_value)
        elif kind not in _LEAVES:
            relax.analysis.post_order_visit(expr, lambda part: seen.setdefault(part) if isinstance(part, Var) else None)
    return list(seen)


def operands(value: Expr) -> Iterator[Expr]:
    """The variables that a value reads, in order, as often as it does."""
    kind = type(value)
    if kind in VARS:
        yield value
    elif kind is Call:
        for arg in value.args[:]:
            yield from operands(arg)
    elif kind is Tuple:
        for each in value.fields[:]:
            yield from operands(each)
    elif kind is TupleGetItem:
        yield from operands(value.tuple_value)


def with_operands(value: Expr, given: Iterator[Expr]) -> Expr:
    """The value with its variables replaced, one by one in order; ``given`` has as many."""
    again = partial(with_operands, given=given)
    kind = type(value)
    if kind in VARS:
        return next(given)
    if kind is Call:
        return Call(value.op, [again(arg) for arg in value.args[:]], value.attrs, value.ty_args, ret_ty=value.ty)
    if kind is Tuple:
        return Tuple([again(each) for each in value.fields[:]])
    if kind is TupleGetItem:
        return TupleGetItem(again(value.tuple_value), value.index)
    return value


def build_function(
    params: Sequence[Var],
    body: Iterable[tuple[Var, Expr]],
    outputs: Sequence[Expr],
    attrs: dict | None = None,
) -> Function:
    """A function in flat form from ANF bindings whose values already carry their types.

    Variables keep their names; variables that are results become dataflow outputs.
    """
    body = list(body)
    normalize = relax.BlockBuilder().normalize
    returned = {output for output in outputs if isinstance(output, Var)}
    remap: dict[Var, Var] = {}
    emitted = []
    for var, value in body:
        kind = Var if var in returned else DataflowVar
        if type(var) is not kind:
            remap[var] = kind(var.name, var.ty)
        emitted.append(VarBinding(remap.get(var, var), normalize(substitute(value, remap) if remap else value)))
    result = normalize(Tuple([remap.get(output, output) if isinstance(output, Var) else output for output in outputs]))
    blocks = [DataflowBlock(emitted)] if emitted else []
    ret_ty = TupleType([output.ty for output in outputs])
    func = Function(list(params), SeqExpr(blocks, result), ret_ty, attrs=DictAttrs(attrs or {}))
    return relax.transform.Normalize()(IRModule({"main": func}))["main"]  # types the body itself


def with_outputs(func: Function, body: Iterable[tuple[Var, Expr]], outputs: Iterable[Expr]) -> Function:
    """``func`` with another body and other results; its parameters and attributes stay."""
    attrs = dict(func.attrs.items()) if func.attrs else None
    return build_function(list(func.params), body, list(outputs), attrs=attrs)


def substitute(value: Expr, mapping: Mapping[Var, Expr]) -> Expr:
    """``value`` with variables replaced; the types of the replaced variables must not change."""
    kind = type(value)
    if kind in VARS:
        return mapping.get(value, value)
    if kind is Call:
        args = value.args[:]
        new = _substituted(args, mapping)
        return value if new is args else Call(value.op, new, value.attrs, value.ty_args, ret_ty=value.ty)
    if kind is Tuple:
        fields = value.fields[:]
        new = _substituted(fields, mapping)
        return value if new is fields else Tuple(new)
    if kind is TupleGetItem:
        source = value.tuple_value
        new = substitute(source, mapping)
        return value if new is source else TupleGetItem(new, value.index)
    return value


def _substituted(values: list[Expr], mapping: Mapping[Var, Expr]) -> list[Expr]:
    """Substitutes in a list; returns the same list if nothing changes."""
    new = [value if type(value) in _LEAVES else substitute(value, mapping) for value in values]
    return values if all(one is other for one, other in zip(new, values, strict=True)) else new
