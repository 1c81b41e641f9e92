"""Unrolling: a function with scans -> the same with their steps one after the other, for who knows no scans."""

from __future__ import annotations

from collections.abc import Sequence

from tvm.relax import op

from autodiff.extents import Extent
from autodiff.ir import (
    Call,
    Expr,
    Function,
    Tuple,
    TupleGetItem,
    Var,
    bindings,
    results,
    shape,
    substitute,
    with_outputs,
)
from autodiff.rewrite import Scope
from autodiff.scan.operator import is_scan, scan_of

__all__ = ["unroll"]


def unroll(func: Function) -> Function:
    """The function without scans, those in their bodies included; the same object if there are none.

    Safe: it is what a scan means. ``ValueError`` for a scan whose length varies.
    """
    if not any(is_scan(value) for _, value in bindings(func)):
        return func
    scope = Scope(var.name for var in (*func.params, *(var for var, _ in bindings(func))))
    made: dict[Var, list[Expr]] = {}
    replaced: dict[Var, Expr] = {}
    for var, value in bindings(func):
        value = substitute(value, replaced)
        if is_scan(value):
            made[var] = _steps(value, scope)
        elif isinstance(value, TupleGetItem) and value.tuple_value in made:
            replaced[var] = made[value.tuple_value][value.index]
        else:
            scope.bind(var, value)
    outputs = [replaced.get(output, output) if isinstance(output, Var) else output for output in results(func)]
    return with_outputs(func, scope.body, outputs)


def _steps(call: Call, scope: Scope) -> list[Expr]:
    """The results of a scan, from its steps."""
    scan, tensors = scan_of(call)
    if isinstance(scan.length, Extent):
        raise ValueError(f"a scan of {scan.length} steps, which vary, cannot be unrolled")
    body = unroll(scan.function)
    carries: Sequence[Expr] = tensors[: scan.carries]
    xs, constants = tensors[scan.carries : scan.carries + scan.xs], tensors[scan.carries + scan.xs :]
    ys: dict[int, list[Expr]] = {}
    for step in reversed(range(scan.length)) if scan.reverse else range(scan.length):
        given = [*carries, *(_part(x, step, scope) for x in xs), *constants]
        known: dict[Var, Expr] = dict(zip(body.params, given, strict=True))
        for var, value in bindings(body):
            known[var] = scope.emit(substitute(value, known), var.name)
        after = [known[value] if isinstance(value, Var) else value for value in results(body)]
        carries, ys[step] = after[: scan.carries], after[scan.carries :]
    columns = zip(*(ys[step] for step in range(scan.length)), strict=True)
    return [*carries, *(_stacked(column, scope) for column in columns)]


def _part(x: Expr, step: int, scope: Scope) -> Var:
    value = scope.emit(op.strided_slice(x, [0], [step], [step + 1], [1]), "part")
    return scope.emit(op.reshape(value, shape(x)[1:]), "part")


def _stacked(parts: Sequence[Expr], scope: Scope) -> Var:
    rows = [scope.emit(op.expand_dims(each, 0), "row") for each in parts]
    return scope.emit(op.concat(Tuple(rows), 0), "rows")
