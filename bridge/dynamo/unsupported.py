"""Unsupported graphs of Dynamo's: a graph and its inputs → ``UnsupportedModule``, and its reason on one line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from bridge.base.errors import Unsupported, UnsupportedModule, user_line
from bridge.base.torch_internals import TRANSFORM_MODULES, HigherOrderOperator

__all__ = ["brief", "check_graph"]

#: Reasons for one graph, and operators for one reason, that are told in full.
MAX_REASONS = 3
#: What Dynamo makes of torch.vmap, which is traced as what the operators inside do to whole batches, and of
#: Tensor.requires_grad_.
_TRACEABLE = (
    "set_inplace_requires_grad_allowed",
    "_set_tensor_requires_grad",
    "lazy_load_decompositions",
    "_vmap_increment_nesting",
    "_vmap_decrement_nesting",
    "_add_batch_dim",
    "_remove_batch_dim",
)


def check_graph(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Raises :class:`UnsupportedModule` for nodes that cannot even be traced, and for odd inputs."""
    problems = [
        Unsupported(_name(node.target), user_line(node.meta.get("stack_trace")) or node.name, reason)
        for node in graph_module.graph.nodes
        if (reason := _objection(node))
    ]
    problems += [
        Unsupported(f"input {position}", "the graph's inputs", "a lazily negated or conjugated tensor")
        for position, value in enumerate(inputs)
        if isinstance(value, torch.Tensor) and (value.is_neg() or value.is_conj())
    ]
    if problems:
        raise UnsupportedModule("DynamoGraph", problems)


def _objection(node: fx.Node) -> str | None:
    """Why a node cannot even be traced."""
    if isinstance(node.target, HigherOrderOperator):
        return "a higher-order operator"
    if node.op == "call_method" and node.target in ("item", "tolist"):
        return "reads numbers from a tensor that the graph computes"
    home = getattr(node.target, "__module__", None) or ""
    if home.startswith(TRANSFORM_MODULES) and _name(node.target) not in _TRACEABLE:
        return "a torch.func transform, or its like: it changes the interpreter's state as it is traced"
    return None


def _name(target: Any) -> str:
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


def brief(error: UnsupportedModule) -> str:
    """Why a graph is unsupported, on one line: an optimizer's step may change hundreds of parameters in place."""
    ops: dict[str, list[str]] = {}
    for problem in error.ops:
        ops.setdefault(problem.reason, []).append(problem.op)
    reasons = [f"{_some(list(dict.fromkeys(names)), ', ')}: {reason}" for reason, names in ops.items()]
    return _some(reasons, "; ")


def _some(words: list[str], separator: str) -> str:
    more = [f"and {len(words) - MAX_REASONS} more"] if len(words) > MAX_REASONS else []
    return separator.join(words[:MAX_REASONS] + more)
