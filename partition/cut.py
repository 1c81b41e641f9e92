"""Partitioning: a joint function and a strategy -> a plan, a forward function and a backward function.

Splitting: a graph and the values that the backward reads -> the forward and the backward function.
Every variable is new (under its old name), so that forward, backward and joint can live in one module.

Scheduling: the backward's bindings -> their order, recomputation as late and last uses as early as possible.

The lower peak of live bytes decides between two deterministic orders (the first wins a tie): the joint function's order
of the adjoint bindings, which follows the forward in reverse; a list schedule that always takes the ready binding that
adds least to the live bytes. In both, other bindings are computed just before their first reader.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from tvm.relax import op

from autodiff import Body
from autodiff.ir import DataflowVar, Expr, Function, TensorType, Var, build_function, shape, substitute
from partition.cost import view_base
from partition.graph import Choice, JointGraph, Strategy, build_graph
from partition.heuristics import (
    bound_recompute_depth,
    save_concatenations,
    save_in_readers_layout,
    save_rows_sources,
    save_weight_casts,
)
from partition.min_cut import MinCut
from partition.plan import BackwardReads, Plan, RecomputeAll, SaveAll, backward_reads, fingerprints, make_plan


def backward_order(graph: JointGraph, body: Collection[str]) -> list[str]:
    """The bindings ``body`` (names) in the order in which the backward computes them."""
    body = set(body)
    adjoint = [name for name in graph.nodes if name in body and name in graph.adjoint]
    natural = _with_demand(graph, body, adjoint)
    scheduled = _with_demand(graph, body, _list_schedule(graph, body, adjoint))
    return min((natural, scheduled), key=lambda order: peak_bytes(graph, order))


def peak_bytes(graph: JointGraph, order: Iterable[str]) -> int:
    """The peak of live bytes of an order, without inputs; a view lives in its base, a result lives to the end."""
    order = list(order)
    inside = set(order)
    storage = {name: view_base(graph, name) for name in order}
    last: dict[str, int] = {}
    for position, name in enumerate(order):
        last[storage[name]] = position
        for read in graph.nodes[name].inputs:
            if read in inside:
                last[storage[read]] = position
    for name in graph.gradients:
        if name in inside:
            last[storage[name]] = len(order)
    dying: dict[int, int] = {}
    for base, position in last.items():
        if base in inside:
            dying[position] = dying.get(position, 0) + graph.nodes[base].bytes
    live = peak = 0
    for position, name in enumerate(order):
        if storage[name] == name:
            live += graph.nodes[name].bytes
        peak = max(peak, live)
        live -= dying.get(position, 0)
    return peak


def _with_demand(graph: JointGraph, body: set[str], adjoint: Iterable[str]) -> list[str]:
    """``adjoint`` in this order, the rest of ``body`` each just before its first reader, unread results last."""
    done: dict[str, None] = {}
    leftovers = [name for name in graph.gradients if name in body]
    for target in (*adjoint, *leftovers):
        stack = [target]
        while stack:
            name = stack[-1]
            waiting = [read for read in graph.nodes[name].inputs if read in body and read not in done]
            if name in done or not waiting:
                stack.pop()
                done.setdefault(name)
            else:
                stack.extend(reversed(waiting))
    return list(done)


def _list_schedule(graph: JointGraph, body: set[str], adjoint: list[str]) -> list[str]:
    """The adjoint bindings; next is always the ready one with the smallest net growth, ties go to the joint order."""
    position = {name: index for index, name in enumerate(adjoint)}
    readers = {name: [user for user in graph.users[name] if user in position] for name in body}
    uses = {name: len(users) for name, users in readers.items()}
    for name in graph.gradients:
        if name in uses:
            uses[name] += 1  # a result never dies
    waiting = {name: sum(read in position for read in graph.nodes[name].inputs) for name in adjoint}

    growth = {name: graph.nodes[name].bytes if view_base(graph, name) == name else 0 for name in adjoint}
    for name in adjoint:
        growth[name] -= sum(graph.nodes[read].bytes for read in graph.nodes[name].inputs if uses.get(read) == 1)

    heap = [(growth[name], position[name], name) for name in adjoint if not waiting[name]]
    heapq.heapify(heap)
    done: dict[str, None] = {}
    while heap:
        name = heapq.heappop(heap)[2]
        if name in done:
            continue  # an outdated entry
        done[name] = None
        for user in readers[name]:
            waiting[user] -= 1
            if not waiting[user]:
                heapq.heappush(heap, (growth[user], position[user], user))
        for read in graph.nodes[name].inputs:
            if read not in uses:
                continue
            uses[read] -= 1
            if uses[read] == 1:
                for user in readers[read]:
                    if user in done:
                        continue
                    growth[user] -= graph.nodes[read].bytes
                    if not waiting[user]:
                        heapq.heappush(heap, (growth[user], position[user], user))
    return list(done)


def split(graph: JointGraph, reads: BackwardReads) -> tuple[Function, Function]:
    """The forward and the backward function.

    Returns:
        forward: all primals -> outputs, then saved tensors. The bindings of the outputs come first, in joint order,
            independent of the choice.
        backward: saved primals, saved outputs, saved tensors, all grad_outs -> gradients.
    """
    body = [name for name in graph.nodes if name in graph.forward] + list(reads.extra)
    results = (*graph.outputs, *reads.saved_tensors)
    constants = (*graph.output_values, *(None for _ in reads.saved_tensors))
    forward = _function(graph, [], {}, graph.primals, body, results, constants)
    params = {
        name: Var(name, graph.nodes[name].var.ty) for name in (*reads.primals, *reads.outputs, *reads.saved_tensors)
    }
    return forward, _backward(graph, list(params.values()), params, reads.computed)


def rebuild_backward(joint: Function, plan: Plan, *, num_primals: int, num_outputs: int) -> Function:
    """The backward of another joint function of the same forward, from the values that ``plan`` saves.

    Serves calls in which only some outputs received a grad_out: ``joint`` has fewer grad_out parameters and other
    gradients. Other values that it needs are recomputed from the saved ones.

    Returns:
        saved primals, saved outputs, saved tensors (all as in ``plan``, read or not), the grad_outs of ``joint`` -> its
        gradients.

    Raises:
        ValueError: ``joint`` has another forward, or needs a primal that ``plan`` does not save.
    """
    graph = build_graph(joint, num_primals, num_outputs, as_read=plan.as_read)
    known = fingerprints(graph)
    held = plan.free + plan.saved_tensors
    for saved in plan.saved_tensors:
        if saved.name in graph.forward and known[saved.name] != plan.fingerprints[saved.name]:
            raise ValueError(f"the plan saves {saved.name}, which this joint function computes in another way")
    outputs = plan.free[len(plan.saved_primals) :]
    for index, saved in zip(plan.saved_outputs, outputs, strict=True):
        name = graph.outputs[index] if index < num_outputs else None
        if name is None or known[name] != plan.fingerprints[saved.name]:
            raise ValueError(f"the plan saves output {index} ({saved.name}), which this joint function does not return")

    params = [Var(saved.name, TensorType(saved.shape, saved.dtype)) for saved in held]
    by_fingerprint = {plan.fingerprints[saved.name]: param for saved, param in zip(held, params, strict=True)}
    by_name = {
        saved.name: param
        for saved, param in zip(held, params, strict=True)
        if known.get(saved.name) == plan.fingerprints[saved.name]
    }
    provided = {
        name: by_name.get(name, by_fingerprint[fingerprint])
        for name, fingerprint in known.items()
        if fingerprint in by_fingerprint
    }
    reads = backward_reads(graph, Choice(dict.fromkeys(provided, "saved by the plan"), use_outputs=False))
    empty = {name for name in reads.primals if name not in provided and 0 in shape(graph.nodes[name].var)}
    missing = [name for name in reads.primals if name not in provided and name not in empty]
    if missing:
        raise ValueError(
            f"this backward needs the primals {missing}, which the plan ({plan.strategy}) does not save; "
            "make the plan for the joint function whose backward reads the most"
        )
    made = {name: DataflowVar(name, graph.nodes[name].var.ty) for name in graph.primals if name in empty}
    return _backward(graph, params, {**provided, **made}, reads.computed, list(made.values()))


def _backward(
    graph: JointGraph,
    params: list[Var],
    provided: Mapping[str, Var],
    computed: Sequence[str],
    empty: Sequence[Var] = (),
) -> Function:
    """The function from ``params`` and all grad_outs to the gradients; ``provided``: node -> its parameter, ``empty``:
    variables without elements, which the function creates."""
    body = backward_order(graph, {*computed, *graph.adjoint})
    made = [(var, op.zeros(shape(var), str(var.ty.dtype))) for var in empty]
    return _function(graph, params, provided, graph.grad_outs, body, graph.gradients, graph.gradient_values, made)


def _function(
    graph: JointGraph,
    params: list[Var],
    provided: Mapping[str, Var],
    more_params: Iterable[str],
    body: Iterable[str],
    results: Sequence[str | None],
    constants: Sequence[Expr],
    made: Sequence[tuple[Var, Expr]] = (),
) -> Function:
    """A flat-form function of copies of nodes, ``made`` first; ``constants[i]`` is the result where ``results[i]`` is
    ``None``."""
    new = {name: Var(name, graph.nodes[name].var.ty) for name in more_params}
    params = [*params, *new.values()]
    new.update(provided)
    old = {graph.nodes[name].var: var for name, var in new.items()}
    returned = set(results)
    emitted = list(made)
    for name in body:
        node = graph.nodes[name]
        var = (Var if name in returned else DataflowVar)(name, node.var.ty)
        emitted.append((var, substitute(node.value, old)))
        new[name] = old[node.var] = var
    values = [constant if name is None else new[name] for name, constant in zip(results, constants, strict=True)]
    return build_function(params, emitted, values)


#: The strategies that go by a name.
STRATEGIES = {"min_cut": MinCut, "save_all": SaveAll, "recompute_all": RecomputeAll}


@dataclass(frozen=True)
class Partitioned:
    """A joint function split in two.

    ``forward``: all primals -> outputs, then saved tensors in plan order. ``backward``: saved primals, saved outputs,
    saved tensors, all grad_outs -> gradients.
    """

    plan: Plan
    forward: Function
    backward: Function


def partition(
    joint: Function | Body,
    *,
    num_primals: int,
    num_outputs: int,
    strategy: str | Strategy = "min_cut",
    module_paths: Mapping[str, str] | None = None,
    as_read: bool = False,
    cast_once: int = 0,
    save_logits: bool = False,
    bound_recompute: bool = False,
    save_concatenation: bool = False,
    again: Mapping[int, tuple[bool, bool]] = MappingProxyType({}),
    owners: Mapping[str, str] = MappingProxyType({}),
    apart: Collection[int] = (),
) -> Partitioned:
    """Splits a joint function into a forward and a backward.

    Args:
        joint: in flat form (see :mod:`autodiff.ir`), or its body, which is edited; parameters are ``num_primals``
            primals, then grad_outs; results are ``num_outputs`` forward outputs, then gradients.
        strategy: ``"min_cut"``, ``"save_all"``, ``"recompute_all"``, or an object such as
            :class:`partition.MinCut` with its options.
        module_paths: variable name -> the value's place in the user's module, for the plan's table.
        as_read: whether tensors are saved in the layout of their readers, for kernels that read only contiguous
            operands. This and the next four are heuristics of :mod:`partition.heuristics`.
        cast_once: number of leading primals whose casts are saved.
        save_logits: whether the logits are saved instead of a softmax.
        bound_recompute: whether the depth of recomputation is bounded.
        save_concatenation: whether a concatenation in the backward is saved instead of its operand.
        again: indices of primals whose memory the backward reads at its own time -> whether autograd saves views of it,
            and whether it is a parameter.
        owners: variable name -> the operation that computes it, see :mod:`partition.read_again`.
        apart: indices of outputs that the caller may change: the backward's copies of them are saved tensors.

    Raises:
        ValueError: unknown strategy; counts that do not fit; a forward output that depends on a grad_out; a random
            draw inside the joint function.
        TypeError: a strategy that is neither a name nor has a ``choose``.
    """
    chosen = resolve(strategy)
    told = {"as_read": as_read, "again": again, "owners": owners, "apart": apart}
    graph = build_graph(joint, num_primals, num_outputs, module_paths, **told)
    choice = chosen.choose(graph)
    if save_logits:
        choice = save_rows_sources(graph, choice)
    if bound_recompute:
        choice = bound_recompute_depth(graph, choice)
    if cast_once:
        choice = save_weight_casts(graph, choice, cast_once)
    if save_concatenation:
        choice = save_concatenations(graph, choice)
    if as_read:
        choice = save_in_readers_layout(graph, choice)
    plan, reads = make_plan(graph, chosen.name, choice, save_all=SaveAll().choose(graph), as_read=as_read)
    forward, backward = split(graph, reads)
    return Partitioned(plan, forward, backward)


def resolve(strategy: str | Strategy) -> Strategy:
    """The strategy object of a name; an object passes through."""
    if isinstance(strategy, str):
        if strategy not in STRATEGIES:
            names = ", ".join(f'"{name}"' for name in STRATEGIES)
            raise ValueError(f'unknown partition strategy "{strategy}"; choose {names}, or pass a strategy object')
        return STRATEGIES[strategy]()
    if isinstance(strategy, type) or not callable(getattr(strategy, "choose", None)):
        raise TypeError(f"a partition strategy is a name or an object with a choose method, got {strategy!r}")
    return strategy
