"""Turned constants: transposed matrices that every step of a scan reads → the matrices, transposed in the body.

For who multiplies by a matrix as it lies, in either order: no transposed copy of it is made before the loop. It undoes
what :mod:`autodiff.scan.hoist` takes out of the steps, and no more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from tvm.relax import op

from autodiff.ir import (
    Call,
    DataflowVar,
    Expr,
    Function,
    TensorType,
    Var,
    bindings,
    build_function,
    dtype,
    op_name,
    permutation,
    results,
    shape,
    substitute,
    with_outputs,
)
from autodiff.scan.operator import body_text, is_scan, scan_call, scan_of

__all__ = ["turned_inside"]


def turned_inside(func: Function) -> Function:
    """The function with its scans reading such matrices; the same object if there are none. Gradients of scans are left
    out: it is for functions that are differentiated already."""
    values = dict(bindings(func))
    made = {var: _turned(value, values) if is_scan(value) else value for var, value in values.items()}
    if all(made[var] is value for var, value in values.items()):
        return func
    return with_outputs(func, list(made.items()), results(func))


def _turned(call: Call, values: Mapping[Var, Expr]) -> Call:
    scan, tensors = scan_of(call)
    function, first = scan.function, scan.carries + scan.xs
    sources = {place: _matrix(tensor, values) for place, tensor in enumerate(tensors) if place >= first}
    sources = {place: source for place, source in sources.items() if source is not None}
    params, body, inner = list(function.params), [], {}
    for place, source in sources.items():
        old = params[place]
        params[place] = Var(old.name, TensorType(shape(source), dtype(source)))
        inner[old] = DataflowVar(f"{old.name}_turned", TensorType(shape(old), dtype(old)))
        body.append((inner[old], op.permute_dims(params[place])))
    body += [(var, substitute(value, inner)) for var, value in bindings(function)]
    outputs = [inner.get(each, each) if isinstance(each, Var) else each for each in results(function)]
    text = body_text(build_function(params, body, outputs)) if sources else None
    if text is None:
        return call
    given = [sources.get(place, tensor) for place, tensor in enumerate(tensors)]
    return scan_call(dataclasses.replace(scan, body=text, gradient=None), given)


def _matrix(tensor: Expr, values: Mapping[Var, Expr]) -> Expr | None:
    """The matrix that a tensor is the transpose of, if it is one."""
    value = values.get(tensor) if isinstance(tensor, Var) else None
    is_transposed = op_name(value) == "relax.permute_dims" and permutation(value) == [1, 0]
    return value.args[0] if is_transposed else None
