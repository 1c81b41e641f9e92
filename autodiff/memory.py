"""Gradients that read memory: a joint body -> the same, with a backward that reads parameters' memory as it then is.

Autograd saves tensors, not their numbers. Its formulas read the memory of an argument, a parameter or a result at the
time of the backward; they also compute from that memory, beside the values that the forward has computed and saved.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tvm import relax

from autodiff.body import Binding, Body, NameSupply
from autodiff.errors import UndifferentiableOp
from autodiff.ir import DataflowVar, Expr, Pairs, TupleGetItem, Var, is_float, library_name, substitute
from autodiff.library import call as library_call
from autodiff.ops import having

OVERWRITTEN = "library.overwritten"
_SHOWS_PART = having("view") | having("slice")
_COMPUTED_ANEW = _SHOWS_PART | having("elementwise") | having("cheap") | having("reduction") | having("row")
_COMPUTED_ANEW |= {"library.index_select"}

_SAVES_RESULTS = (
    "it reads memory that forward overwrites by .data, and its gradient what was computed of that; clone what it reads"
)


def read_memory(
    body: Body,
    gradient: Collection[Binding],
    owners: Mapping[str, str],
    again: Mapping[int, bool],
    statistics: Collection[str],
) -> None:
    """Makes the backward read memory at its own time, and recompute from it an operation's inner values.

    Raises :class:`UndifferentiableOp` where an operation of several steps reads memory that forward overwrites: eager
    saves some of its inner results.
    """
    parameters, supply = body.parameters(), NameSupply(body.names())
    forward = [binding for binding in body.bindings if binding not in gradient]
    marks = [binding for binding in forward if library_name(binding.value) == OVERWRITTEN]
    last = {int(mark.value.args[2].value): mark.var for mark in marks if int(mark.value.args[3].value)}
    written = {body.binding(var) for var in last.values()}
    made = [_in_the_end(body, supply, parameters[place].var, place) for place in sorted(again.keys() - last.keys())]
    last |= {int(mark.value.args[2].value): mark.var for mark in made}
    instead: dict[Binding, Expr] = {parameters[place]: var for place, var in last.items()}
    instead |= {mark: last[place] for mark in marks if (place := int(mark.value.args[2].value)) in last}
    looked_at = {binding: True for binding in marks}
    looked_at |= {parameters[place]: again.get(place, True) for place in last}
    places = {binding: {place for place, var in last.items() if var is instead[binding]} for binding in instead}
    computed, returned = dict[Binding, str](), body.returned()
    own = {binding: owners.get(binding.name, binding) for binding in forward}
    for binding in forward if last else ():
        value = binding.value
        of_split = isinstance(value, TupleGetItem) and body.binding(value.tuple_value).op == "relax.split"
        is_part = binding.op in _SHOWS_PART or of_split
        is_inner = binding not in returned and binding.name not in statistics
        is_inner = is_inner and {own[user] for user in binding.users if user in own} <= {own[binding]}
        is_view = is_part and all(looked_at.get(read) for read in binding.reads)
        found = [read for read in binding.reads if read in instead]
        if binding in instead or not found or not (is_view or is_inner):
            continue
        value = substitute(binding.value, {read.var: instead[read] for read in found})
        anew = body.define(DataflowVar(supply.fresh(binding.name), binding.var.ty), value)
        is_written = not written.isdisjoint(anew.reads)
        if not is_written and (library_name(value) or binding.op) not in _COMPUTED_ANEW:
            body.undefine(anew)
            continue
        made.append(anew)
        instead[binding], places[binding] = anew.var, set().union(*(places[read] for read in found))
        if is_part and looked_at.keys() >= {*binding.reads}:
            looked_at[binding] = is_view
        if is_written:
            written.add(anew)
            if not is_part and binding.op != "relax.astype" and is_float(anew.var):
                computed[anew] = binding.name
    backward = [binding for binding in body.bindings if binding in gradient]
    asked = {int(mark.value.args[2].value) for mark in marks}
    asked = asked.union(*(places[read] for each in backward for read in _read_anew(each, instead, looked_at, own)))
    instead = {binding: var for binding, var in instead.items() if places[binding] & asked}
    for binding in backward:
        body.substitute(binding, instead)
    body.bindings = [*forward, *made, *backward]
    body.prune()
    for binding in body.bindings:
        if binding in computed:
            raise UndifferentiableOp(str(binding.op), computed[binding], _SAVES_RESULTS)


def _read_anew(
    binding: Binding, instead: Collection[Binding], looked_at: Collection[Binding], own: Collection[Binding]
) -> list[Binding]:
    """Operands of a backward binding that are computed of memory, or that an equal forward binding reads."""

    def is_asked(read: Binding) -> bool:
        alike = (user for user in read.users if user in own and user.op == binding.op)
        return read not in looked_at or any([*user.reads] == [*binding.reads] for user in alike)

    return [read for read in binding.reads if read in instead and is_asked(read)]


def with_own_results(
    body: Body, active: Pairs, owners: Mapping[str, str], again: Collection[int]
) -> tuple[Pairs, Mapping[str, str]]:
    """Makes gradients of normalizations recompute the result from the input's memory: autograd saves the input."""
    parameters, supply = body.parameters(), NameSupply(body.names())
    shown = {parameters[place] for place in again}
    for binding in body.bindings if again else ():
        is_cast = binding.op == "relax.astype" and {owners.get(user.name) for user in binding.users} == {
            owners.get(binding.name, "")
        }
        if (binding.op in _SHOWS_PART or is_cast) and shown.issuperset(binding.reads):
            shown.add(binding)
    found: Pairs = []
    for var, value in active:
        if library_name(value) == "library.normalize" and body.binding(value.args[1]) in shown:
            result = body.binding(var)
            own = body.define(DataflowVar(supply.fresh(var.name), var.ty), result.value)
            body.bindings.insert(body.bindings.index(result), own)
            owners = {**owners, own.name: owners.get(result.name, result.name)}
            found.append((own.var, value))
            value = library_call("overwritten", [own.var, relax.prim_value(0), relax.prim_value(0)], var.ty)
        found.append((var, value))
    return found, owners


def _in_the_end(body: Body, supply: NameSupply, given: Var, place: int) -> Binding:
    """A new binding of ``library.overwritten``: a parameter's memory at the time of the backward."""
    value = library_call("overwritten", [given, relax.prim_value(place), relax.prim_value(1)], given.ty)
    return body.define(DataflowVar(supply.fresh(f"{given.name}_now"), given.ty), value)
