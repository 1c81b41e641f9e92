"""Scans for training: a scan -> one that also returns the saved tensors of its backward, and has a gradient.

The body is differentiated and split once, like any joint function: the strategy decides for one step, and its saved
tensors are held for all steps.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from autodiff import clean, differentiate, join_products, spell_out, unique_names
from autodiff.body import Binding, Body, on_functions
from autodiff.ir import (
    DataflowVar,
    Expr,
    Function,
    TensorType,
    TupleGetItem,
    Var,
    bindings,
    build_function,
    is_float,
    op_name,
    results,
    used_vars,
)
from autodiff.ops import STOP
from autodiff.scan import (
    BackwardParameter,
    BackwardStep,
    Scan,
    body_text,
    gradient_of,
    is_scan,
    scan_call,
    scan_of,
)
from partition.cut import partition
from partition.graph import Strategy


@on_functions
def differentiable_scans(
    body: Body, required: Sequence[int], strategy: str | Strategy = "min_cut", sums_later: bool = False
) -> None:
    """Gives gradients to the scans through which gradients of the ``required`` parameters flow.

    Their results keep their indices; the saved tensors follow.

    Args:
        required: indices of parameters whose gradients are wanted; none: bodies are only simplified.
        strategy: of :func:`partition.partition`, for one step of each scan.
        sums_later: see :mod:`autodiff.scan.reverse`.

    Raises:
        UndifferentiableOp: an operator of a body without a gradient.
    """
    active = {body.binding(body.params[index]) for index in required}
    read = _read_results(body)
    for binding in list(body.bindings):
        if binding.op != STOP and any(read in active for read in binding.reads):
            active.add(binding)
        if is_scan(binding.value):
            made = _make_differentiable(body, binding, active, read[binding], strategy, sums_later)
            if binding in active:
                active.add(made)  # its readers become active


def _read_results(body: Body) -> dict[Binding, frozenset[int]]:
    """Scan -> the results that outputs of the function depend on, through operators that pass gradients on."""
    live = set(body.returned())
    read: dict[Binding, set[int]] = {binding: set() for binding in body.bindings if is_scan(binding.value)}
    for binding in reversed(body.bindings):
        if binding not in live or _stops(binding.var, binding.op):
            continue
        live.update(binding.reads)
        if type(binding.value) is TupleGetItem and binding.reads[0] in read:
            read[binding.reads[0]].add(binding.value.index)
    return {binding: frozenset(places) for binding, places in read.items()}


def _stops(var: Var, op: str | None) -> bool:
    """Whether an operator passes no gradient on: a gradient stop, or a result without floats."""
    return op == STOP or (isinstance(var.ty, TensorType) and not is_float(var))


def _make_differentiable(
    body: Body,
    binding: Binding,
    active: set[Binding],
    read: frozenset[int],
    strategy: str | Strategy,
    sums_later: bool,
) -> Binding:
    """Replaces a scan by one with a gradient; returns the new binding."""
    scan, tensors = scan_of(binding.value)
    given = [isinstance(tensor, Var) and body.binding(tensor) in active for tensor in tensors]
    active_params, active_results = _flow(scan, given)
    read = read.intersection(active_results) or frozenset(active_results)  # if none is read, all gradients are zero
    wanted, differentiated = _demanded(scan, active_params, active_results, read)
    made = scan
    if differentiated and wanted:
        zero = tuple(place for place in active_params if place not in wanted)
        made = _with_gradient(scan, wanted, differentiated, zero, strategy, sums_later)
    else:
        text = body_text(_simple(scan, merge_casts=True))
        if active_params:  # each step stops the gradients
            scan = dataclasses.replace(scan, gradient={"wanted": [], "zero": list(active_params)})
        made = scan if text is None else dataclasses.replace(scan, body=text)
    call = scan_call(made, tensors)
    place = body.bindings.index(binding)
    var = DataflowVar(binding.name, call.ty_args[0])
    new = body.define(var, call)
    body.bindings[place] = new
    for user in list(binding.users):
        body.substitute(user, {binding: var})
    body.undefine(binding)
    return new


def _flow(scan: Scan, given: Sequence[bool]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Indices of body parameters and results that gradients flow through, including those reached through carries."""
    function, given = scan.function, list(given)
    outputs = results(function)
    while True:
        active = {param for param, flows in zip(function.params, given, strict=True) if flows and is_float(param)}
        wanted = tuple(place for place, param in enumerate(function.params) if param in active)
        for var, value in bindings(function):
            if op_name(value) != STOP and any(read in active for read in used_vars(value)):
                active.add(var)
        reached = tuple(place for place, output in enumerate(outputs) if output in active and is_float(output))
        more = [place for place in reached if place < scan.carries and not given[place]]
        if not more:
            return wanted, reached
        for place in more:
            given[place] = True


def _demanded(
    scan: Scan, wanted: tuple[int, ...], differentiated: tuple[int, ...], read: frozenset[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Active parameters and results -> the subset that a gradient reaches from results that are read, through carries.

    The gradient of any other carry is zero in all steps; computed, it is nan where a derivative is infinite.
    """
    function, outputs = scan.function, results(scan.function)
    backwards = list(bindings(function))[::-1]
    demanded = set(read)
    while True:
        live = {outputs[place] for place in demanded}
        for var, value in backwards:
            if var in live and not _stops(var, op_name(value)):
                live.update(used_vars(value))
        carried = {place for place in differentiated if place < scan.carries and function.params[place] in live}
        if carried <= demanded:
            break
        demanded |= carried
    live |= {function.params[place] for place in demanded if place < scan.carries}  # they carry the gradient back
    return tuple(place for place in wanted if function.params[place] in live), tuple(sorted(demanded))


def _simple(scan: Scan, merge_casts: bool) -> Function:
    """The scan's body, simplified."""
    return unique_names(clean(spell_out(scan.function), merge_casts=merge_casts))


def _with_gradient(
    scan: Scan,
    wanted: tuple[int, ...],
    differentiated: tuple[int, ...],
    zero: tuple[int, ...],
    strategy: str | Strategy,
    sums_later: bool,
) -> Scan:
    """The scan with a gradient, and with its saved tensors as further results."""
    make = _step_of_any_length if isinstance(strategy, str) else _step
    text, step = make(dataclasses.replace(scan, length=1), wanted, differentiated, strategy)
    if text is None:
        raise ValueError("a literal in the body of a loop cannot be written down")
    return dataclasses.replace(scan, body=text, gradient=gradient_of(dataclasses.replace(step, zero=zero), sums_later))


def _step(
    scan: Scan, wanted: tuple[int, ...], differentiated: tuple[int, ...], strategy: str | Strategy
) -> tuple[str | None, BackwardStep]:
    """The text of the body that returns the saved tensors (``None`` if TVM's JSON cannot hold it), and the backward of
    one step; both are independent of the scan's length."""
    simple = _simple(scan, merge_casts=False)
    outputs = len(results(simple))
    joint = clean(differentiate(simple, differentiated, wanted))
    cut = partition(joint, num_primals=len(simple.params), num_outputs=outputs, strategy=strategy)
    forward, plan = cut.forward, cut.plan
    made = list(results(forward))
    params: list[BackwardParameter] = []
    after: dict[int, int] = {}

    def held(value: Expr) -> int:
        """The y that holds a result of the body."""
        for place in range(scan.carries, len(made)):
            if made[place].same_as(value):
                return place
        made.append(value)
        return len(made) - 1

    for place in plan.saved_primals:
        if place < scan.carries:
            params.append(BackwardParameter("before", place))
            after[place] = held(made[place])
        elif place < scan.carries + scan.xs:
            params.append(BackwardParameter("x", place - scan.carries))
        else:
            params.append(BackwardParameter("constant", place - scan.carries - scan.xs))
    params += [BackwardParameter("y", held(made[place])) for place in plan.saved_outputs]
    params += [BackwardParameter("y", outputs + place) for place in range(len(plan.saved_tensors))]
    params += [BackwardParameter("grad", place) for place in differentiated]
    text = body_text(build_function(list(forward.params), list(bindings(forward)), made))
    return text, BackwardStep(join_products(cut.backward), tuple(params), wanted, differentiated, after)


_step_of_any_length = functools.lru_cache(maxsize=64)(_step)
