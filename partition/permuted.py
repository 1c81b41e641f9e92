"""Permutations made once: a joint function's bindings -> bindings in which what the forward permutes is permuted once.

A product reads its operand's rows as rows or as columns, and its gradients read them in the other way: simplified, each
permutes the same value. Here all of them read one permutation that keeps the last axis, as rows, and turn that. It is
what can be saved for the backward: :mod:`partition.as_read`. No value changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from tvm.relax import op

from autodiff import Body
from autodiff.body import Binding
from autodiff.ir import Call, DataflowVar, Expr, shape
from partition.normalize import ancestors

__all__ = ["PERMUTATION", "keeps_rows", "permute_once"]

PERMUTATION = "relax.permute_dims"


def permute_once(body: Body, outputs: Iterable[Expr]) -> None:
    """Rewrites the body in place; what the forward permutes decides, so that all backwards of one forward agree."""
    forward = ancestors(body, outputs)
    taken = body.names()
    orders: dict[Binding, list[int] | None] = {}
    rows: dict[Binding, Binding] = {}
    replaced: dict[Binding, Expr] = {}
    result: list[Binding] = []
    for binding in body.bindings:
        body.substitute(binding, replaced)
        if binding.op == PERMUTATION:
            (source,), axes = binding.reads, _axes(binding.value)
            if source not in orders:
                orders[source] = _rows_of(source, forward)
            order = orders[source]
            if order is not None and _as_rows(axes) == order:
                if source not in rows:
                    rows[source] = binding if axes == order else _rows(body, source, order, taken)
                    result += [rows[source]] if axes != order else []
                elif axes == order:
                    replaced[binding] = rows[source].var
                    continue
                if axes != order:
                    body.assign(binding, op.permute_dims(rows[source].var, [order.index(axis) for axis in axes]))
        result.append(binding)
    body.finish(result, replaced)


def _rows(body: Body, source: Binding, order: list[int], taken: set[str]) -> Binding:
    """A new binding: the permutation that keeps the last axis."""
    name = f"{source.name}_rows"
    while name in taken:
        name += "_"
    taken.add(name)
    value = body.normalize(op.permute_dims(source.var, order))
    return body.define(DataflowVar(name, value.ty), value)


def keeps_rows(permuted: Call) -> bool:
    """Whether the last axis stays the last one."""
    axes = _axes(permuted)
    return axes == _as_rows(axes)


def _axes(permuted: Call) -> list[int]:
    """Of a ``permute_dims``, non-negative."""
    rank, axes = len(shape(permuted)), permuted.attrs.axes
    return list(range(rank))[::-1] if axes is None else [int(axis) % rank for axis in axes]


def _rows_of(source: Binding, forward: Set[Binding]) -> list[int] | None:
    """The one order of rows in which the forward reads a value; ``None``: there is none, or it is the value's own."""
    readers = [user for user in source.users if user in forward]
    if not readers or any(user.op != PERMUTATION for user in readers):
        return None
    orders = [_as_rows(_axes(user.value)) for user in readers]
    return None if orders[0] == sorted(orders[0]) or any(order != orders[0] for order in orders) else orders[0]


def _as_rows(axes: list[int]) -> list[int]:
    """The permutation with the last axis back in its place."""
    last = len(axes) - 1
    return [*(axis for axis in axes if axis != last), last]
