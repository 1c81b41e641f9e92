"""Normalization of a joint function's bindings before it is cut: bindings -> bindings that read less.

Only bindings that no forward output depends on are rewritten, so the forward stays bit for bit.

* A value read only for its shape (``zeros_like(x)``) is not read at all: shapes are known, so ``x`` need not be saved.
* A tuple that a later call reads as a whole is rebuilt from its items, because only items are ever captured.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tvm import relax

from autodiff import Body
from autodiff.body import Binding
from autodiff.ir import Call, DataflowVar, Expr, Tuple, TupleGetItem, TupleType, shape
from autodiff.zapp import LIKE

__all__ = ["ancestors", "normalize"]


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
