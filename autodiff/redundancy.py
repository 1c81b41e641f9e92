"""Redundancy elimination: a function -> the same without equal values, dead bindings and repeated names."""

from __future__ import annotations

from collections.abc import Hashable

from tvm_ffi import StructuralKey

from autodiff.body import Binding, Body, NameSupply, on_functions
from autodiff.ir import (
    VARS,
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
    library_name,
    op_name,
    used_vars,
)
from autodiff.library import call as library_call


@on_functions
def unique_names(body: Body) -> None:
    """Renames variables whose name an earlier variable has: ``x``, ``x`` becomes ``x``, ``x_1``.

    Safe: names carry no meaning in Relax. Parameters come first, so a binding gives way to a parameter; a second
    parameter of one name is renamed as well. Why: gradients, plans and saved tensors refer to variables by name.
    """
    supply = NameSupply(body.names())
    used: set[str] = set()
    renamed: dict[Binding, str] = {}
    for binding in [*body.parameters(), *body.bindings]:
        if binding.name in used:
            renamed[binding] = supply.fresh(binding.name)
        used.add(binding.name)
    body.rename(renamed)


@on_functions
def dead_code_elimination(body: Body, since: int = 0) -> None:
    """Drops bindings that no result needs. Safe: in flat form every binding is pure."""
    body.prune()


def collectives_in_order(func: Function) -> Function:
    """Makes each collective read the one before it as well, so that no schedule exchanges them.

    The processes of a group must call its collectives in one order, and a schedule may depend on a process's timings.
    """
    if not any(library_name(value) == COLLECTIVE for _, value in bindings(func)):
        return func
    body, before = Body.of(func), []
    for binding in body.bindings:
        if library_name(binding.value) == COLLECTIVE:
            _, *options = binding.value.args
            if before and len(options) == _ALONE:
                body.assign(binding, library_call("collective", [*options, *before], binding.var.ty))
            before = [binding.var]
    return body.function() if body.edits else func


_ALONE = 5
"""The arguments of a collective that reads no other one."""
COLLECTIVE = "library.collective"


def live_bindings(body: list[tuple[Var, Expr]], outputs: list[Expr]) -> list[tuple[Var, Expr]]:
    """The bindings that the outputs need, in order."""
    needed = {output for output in outputs if isinstance(output, Var)}
    live = []
    for var, value in reversed(body):
        if var in needed:
            live.append((var, value))
            needed.update(used_vars(value))
    return live[::-1]


@on_functions
def common_subexpression_elimination(body: Body, since: int = 0, *, merge_casts: bool = True) -> None:
    """Computes equal values once; the name of the first occurrence survives.

    Safe: in flat form every binding is pure, random draws are parameters. A function that will be differentiated needs
    ``merge_casts=False``, which keeps casts to a lower precision apart: the gradients of two casts are added in the
    wide type, the gradients of two uses of one cast in the narrow type.
    """
    first: dict[Hashable, Binding] = {}
    replaced: dict[Binding, Expr] = {}
    remaining = []
    for binding in body.bindings:
        if replaced and binding.changed == body.clock:
            body.substitute(binding, replaced)
        if not merge_casts and binding.op == "relax.astype" and _loses_bits(binding.value):
            remaining.append(binding)
            continue
        if binding.key is None:
            binding.key = body.number_of(_key(binding.value, body))
        same = first.setdefault(binding.key, binding)
        if same is binding:
            remaining.append(binding)
        else:
            replaced[binding] = same.var
            body.touch(binding)
    if replaced:
        body.finish(remaining, replaced)


def _loses_bits(value: Expr) -> bool:
    """Whether a value is a cast of floating point numbers to fewer bits."""
    if op_name(value) != "relax.astype" or not is_float(value) or not is_float(value.args[0]):
        return False
    return itemsize(dtype(value)) < itemsize(dtype(value.args[0]))


def _key(value: Expr, body: Body) -> Hashable:
    """A hash key, equal for values that compute the same: variables by identity, everything else by structure."""
    kind = type(value)
    if kind is Call:
        attrs = None if value.attrs is None else StructuralKey(value.attrs)
        op = op_name(value) or StructuralKey(value.op)
        return (op, attrs, StructuralKey(value.ty), *[_key(arg, body) for arg in value.args[:]])
    if kind in VARS:
        return body.binding(value) or StructuralKey(value)  # an extent has no binding
    if kind is Tuple:
        return ("tuple", *[_key(field, body) for field in value.fields[:]])
    if kind is TupleGetItem:
        return ("item", value.index, _key(value.tuple_value, body))
    return StructuralKey(value)
