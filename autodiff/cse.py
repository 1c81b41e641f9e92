"""Common subexpression elimination: a function -> the same with equal values computed once."""

from __future__ import annotations

from collections.abc import Hashable

from tvm_ffi import StructuralKey

from autodiff.ir import (
    Call,
    Expr,
    Function,
    Tuple,
    TupleGetItem,
    Var,
    bindings,
    dtype,
    is_float,
    itemsize,
    op_name,
    results,
    substitute,
    with_outputs,
)

__all__ = ["common_subexpression_elimination"]


def common_subexpression_elimination(func: Function, *, merge_casts: bool = True) -> Function:
    """Computes equal values once; the name of the first occurrence survives.

    Safe: in flat form every binding is pure, random draws are parameters. But what is to be differentiated yet wants
    ``merge_casts=False``, which leaves casts to a lower precision alone: the gradients of two casts are added up in the
    wide type, those of one cast's two uses in the narrow one.
    """
    first: dict[Hashable, Var] = {}
    replaced: dict[Var, Expr] = {}
    body = []
    for var, value in bindings(func):
        value = substitute(value, replaced)
        if not merge_casts and _loses_bits(value):
            body.append((var, value))
            continue
        key = _key(value)
        if key in first:
            replaced[var] = first[key]
            continue
        first[key] = var
        body.append((var, value))
    if not replaced:
        return func
    outputs = [replaced.get(output, output) if isinstance(output, Var) else output for output in results(func)]
    return with_outputs(func, body, outputs)


def _loses_bits(value: Expr) -> bool:
    """Whether a value is a cast of floating point numbers to fewer bits."""
    if op_name(value) != "relax.astype" or not is_float(value) or not is_float(value.args[0]):
        return False
    return itemsize(dtype(value)) < itemsize(dtype(value.args[0]))


def _key(value: Expr) -> Hashable:
    """Equal for values that compute the same: variables by identity, everything else by structure."""
    if isinstance(value, Var):
        return value
    if isinstance(value, Tuple):
        return ("tuple", *(_key(field) for field in value.fields))
    if isinstance(value, TupleGetItem):
        return ("item", value.index, _key(value.tuple_value))
    if isinstance(value, Call):
        attrs = None if value.attrs is None else StructuralKey(value.attrs)
        return (_key(value.op), attrs, StructuralKey(value.ty), *(_key(arg) for arg in value.args))
    return StructuralKey(value)
