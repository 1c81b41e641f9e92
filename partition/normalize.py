"""Normalization of a joint function's bindings before it is cut: bindings -> bindings that read less.

Only bindings that no forward output depends on are rewritten, so the forward stays bit for bit.

* A value read only for its shape (``zeros_like(x)``) is not read at all: shapes are static, so ``x`` need not be saved.
* A tuple that a later call reads as a whole is rebuilt from its items, because only items are ever captured.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from tvm import relax

from autodiff.ir import (
    Call,
    DataflowVar,
    Expr,
    Tuple,
    TupleGetItem,
    TupleType,
    Var,
    op_name,
    shape,
    substitute,
    used_vars,
)
from autodiff.zapp import LIKE

Binding = tuple[Var, Expr]

__all__ = ["ancestors", "normalize"]


def normalize(body: Sequence[Binding], outputs: Iterable[Expr]) -> list[Binding]:
    """The same bindings after both rewrites; those that ``outputs`` depend on are left as they are."""
    forward = ancestors(body, outputs)
    taken = {var.name for var, _ in body}
    rebuilt: dict[Var, Var] = {}
    tuples = {var: value for var, value in body if isinstance(var.ty, TupleType) and isinstance(value, Call)}
    items: dict[tuple[Var, int], Var] = {}
    result: list[Binding] = []
    for var, value in body:
        if isinstance(value, TupleGetItem) and isinstance(value.tuple_value, Var):
            items.setdefault((value.tuple_value, value.index), var)
        if var in forward or isinstance(value, TupleGetItem):
            result.append((var, value))
            continue
        value = _forget_shapes(value)
        whole = [read for read in used_vars(value) if read in tuples]
        for read in whole:
            if read not in rebuilt:
                result.extend(_take_apart(read, items, taken))
                rebuilt[read] = result[-1][0]
        result.append((var, substitute(value, {read: rebuilt[read] for read in whole})))
    return result


def ancestors(body: Sequence[Binding], outputs: Iterable[Expr]) -> set[Var]:
    """The bound variables that ``outputs`` depend on, themselves included."""
    wanted = {output for output in outputs if isinstance(output, Var)}
    for var, value in reversed(body):
        if var in wanted:
            wanted.update(used_vars(value))
    return wanted & {var for var, _ in body}


def _take_apart(source: Var, items: dict[tuple[Var, int], Var], taken: set[str]) -> Iterator[Binding]:
    """Bindings that take a tuple apart, where ``items`` lacks some, and rebuild it in the last one."""
    fields = []
    for index, field in enumerate(source.ty.fields):
        item = items.get((source, index))
        if item is None:
            item = items[source, index] = DataflowVar(_fresh(f"{source.name}_{index}", taken), field)
            yield item, TupleGetItem(source, index)
        if isinstance(field, TupleType):
            *inner, last = _take_apart(item, items, taken)
            yield from (*inner, last)
            item = last[0]
        fields.append(item)
    value = relax.BlockBuilder().normalize(Tuple(fields))
    yield DataflowVar(_fresh(f"{source.name}_rebuilt", taken), source.ty), value


def _fresh(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def _forget_shapes(value: Expr) -> Expr:
    """``…_like`` operations spelled with the static shape and dtype of the operand they only look at."""
    rewrite = _LIKE.get(op_name(value))
    return value if rewrite is None else relax.BlockBuilder().normalize(rewrite(value))


_LIKE = {**LIKE, "relax.collapse_sum_like": lambda call: relax.op.collapse_sum_to(call.args[0], shape(call))}
