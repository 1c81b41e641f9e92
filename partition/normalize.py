"""Normalization of a joint function's bindings before it is cut: bindings -> bindings that read less.

Only bindings that no forward output depends on are rewritten, so the forward stays bit for bit.

* A value read only for its shape (``zeros_like(x)``) is not read at all: shapes are known, so ``x`` need not be saved.
* A tuple that a later call reads as a whole is rebuilt from its items, because only items are ever captured.

Permutations made once: a joint function's bindings -> bindings in which what the forward permutes is permuted once.
A product reads its operand's rows as rows or as columns, and its gradients read them in the other way: simplified, each
permutes the same value. Here all of them read one permutation that keeps the last axis, as rows, and turn that. It is
what can be saved for the backward: :mod:`partition.heuristics`. No value changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set

from tvm import relax
from tvm.relax import op

from autodiff import Body
from autodiff.body import Binding
from autodiff.ir import Call, DataflowVar, Expr, Tuple, TupleGetItem, TupleType, shape
from autodiff.zapp import LIKE

__all__ = ["PERMUTATION", "ancestors", "keeps_rows", "normalize", "permute_once"]


def normalize(body: Body, outputs: Iterable[Expr]) -> None:
    """Both rewrites, in place; the bindings that ``outputs`` depend on are left as they are."""
    forward = ancestors(body, outputs)
    taken = {binding.name for binding in body.bindings}
    tuples = {each for each in body.bindings if isinstance(each.value, Call) and isinstance(each.var.ty, TupleType)}
    rebuilt: dict[Binding, Expr] = {}
    items: dict[tuple[Binding, int], Binding] = {}
    result: list[Binding] = []
    for binding in body.bindings:
        if isinstance(binding.value, TupleGetItem):
            items.setdefault((binding.reads[0], binding.value.index), binding)
        elif binding not in forward:
            if binding.op in _LIKE:
                body.assign(binding, _LIKE[binding.op](binding.value))
            whole = [read for read in binding.reads if read in tuples]
            for read in whole:
                if read not in rebuilt:
                    result.extend(_take_apart(read, items, taken, body))
                    rebuilt[read] = result[-1].var
            if whole:
                body.substitute(binding, rebuilt)
        result.append(binding)
    body.finish(result, {})


def ancestors(body: Body, outputs: Iterable[Expr]) -> set[Binding]:
    """The bindings that ``outputs`` depend on, and parameters."""
    wanted = {body.binding(output) for output in outputs}
    for binding in reversed(body.bindings):
        if binding in wanted:
            wanted.update(binding.reads)
    return wanted


def _take_apart(
    source: Binding, items: dict[tuple[Binding, int], Binding], taken: set[str], body: Body
) -> Iterator[Binding]:
    """Bindings that take a tuple apart, where ``items`` lacks some, and rebuild it in the last one."""
    fields = []
    for index, field in enumerate(source.var.ty.fields):
        item = items.get((source, index))
        if item is None:
            var = DataflowVar(_fresh(f"{source.name}_{index}", taken), field)
            item = items[source, index] = body.define(var, TupleGetItem(source.var, index))
            yield item
        if isinstance(field, TupleType):
            *inner, item = _take_apart(item, items, taken, body)
            yield from (*inner, item)
        fields.append(item.var)
    yield body.define(DataflowVar(_fresh(f"{source.name}_rebuilt", taken), source.var.ty), Tuple(fields))


def _fresh(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    taken.add(name)
    return name


#: ``…_like`` operations spelled with the shape and dtype of the operand that they only look at.
_LIKE = {**LIKE, "relax.collapse_sum_like": lambda call: relax.op.collapse_sum_to(call.args[0], shape(call))}


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
