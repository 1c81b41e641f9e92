"""Splitting: a graph and its captured set -> the forward and the backward function.

Every variable is made anew (under its name), so that forward, backward and joint can live in one module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tvm.relax import op

from autodiff.ir import DataflowVar, Expr, Function, TensorType, Var, build_function, shape, substitute
from partition.captured_set import CapturedSet, captured_set, fingerprints
from partition.graph import Graph, build_graph
from partition.order import backward_order
from partition.plan import Plan
from partition.strategy import Choice

__all__ = ["rebuild_backward", "split"]


def split(graph: Graph, captured: CapturedSet) -> tuple[Function, Function]:
    """The forward and the backward function.

    Returns:
        forward: all primals -> outputs, then captures. The bindings behind the outputs come first, in joint order,
            whatever is captured.
        backward: saved primals, saved outputs, captures, all grad_outs -> gradients.
    """
    body = [name for name in graph.nodes if name in graph.forward] + list(captured.extra)
    results = (*graph.outputs, *captured.captures)
    constants = (*graph.output_values, *(None for _ in captured.captures))
    forward = _function(graph, [], {}, graph.primals, body, results, constants)
    params = {
        name: Var(name, graph.nodes[name].var.ty) for name in (*captured.primals, *captured.outputs, *captured.captures)
    }
    return forward, _backward(graph, list(params.values()), params, captured.computed)


def rebuild_backward(joint: Function, plan: Plan, *, num_primals: int, num_outputs: int) -> Function:
    """The backward of another joint function of the same forward, from the values that ``plan`` saves.

    For a call in which only some outputs received a grad_out: ``joint`` has fewer grad_out parameters and other
    gradients. What it needs beyond the saved values is recomputed from them.

    Returns:
        saved primals, saved outputs, captures (all as in ``plan``, read or not), the grad_outs of ``joint`` -> its
        gradients.

    Raises:
        ValueError: ``joint`` has another forward, or needs a primal that ``plan`` does not save.
    """
    graph = build_graph(joint, num_primals, num_outputs, as_read=plan.as_read)
    known = fingerprints(graph)
    held = plan.free + plan.captures
    for saved in plan.captures:
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
    reads = captured_set(graph, Choice(dict.fromkeys(provided, "saved by the plan"), use_outputs=False))
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
    graph: Graph, params: list[Var], provided: Mapping[str, Var], computed: Sequence[str], empty: Sequence[Var] = ()
) -> Function:
    """The function from ``params`` and all grad_outs to the gradients; ``provided`` says which nodes the params are.

    ``empty``: those of them that hold nothing and are made on the spot.
    """
    body = backward_order(graph, {*computed, *graph.adjoint})
    made = [(var, op.zeros(shape(var), str(var.ty.dtype))) for var in empty]
    return _function(graph, params, provided, graph.grad_outs, body, graph.gradients, graph.gradient_values, made)


def _function(
    graph: Graph,
    params: list[Var],
    provided: Mapping[str, Var],
    more_params: Iterable[str],
    body: Iterable[str],
    results: Sequence[str | None],
    constants: Sequence[Expr],
    made: Sequence[tuple[Var, Expr]] = (),
) -> Function:
    """A flat-form function of copies of nodes; ``constants[i]`` is the result where ``results[i]`` is ``None``.

    ``made``: bindings that come first.
    """
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
