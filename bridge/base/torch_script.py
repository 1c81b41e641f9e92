"""TorchScript functions: run operator by operator, without the fusions of earlier calls."""

from __future__ import annotations

from typing import Any

import torch

from bridge.base.torch_internals import find

ScriptFunction: type = torch.jit.ScriptFunction
_call_script = ScriptFunction.__call__
_function_of_graph = find("torch._C._create_function_from_graph")


def run_unfused(function: Any, *args: Any, fakes: bool, **kwargs: Any) -> Any:
    """A TorchScript function's results, computed operator by operator, whatever its earlier calls have optimized.

    A first call runs unfused: this calls a new function with the same graph. Not on real tensors if the graph holds
    tensors, as a traced one does: torch does not read them in a first call under a mode. ``fakes``: on fake tensors.
    """
    constants = () if fakes else (node for node in function.graph.nodes() if node.kind() == "prim::Constant")
    if any(node.hasAttribute("value") and node.kindOf("value") == "t" for node in constants):
        return _call_script(function, *args, **kwargs)
    fresh = _function_of_graph(function.name, function.graph)
    left = function.schema.arguments[len(args) :]  # a graph has neither their names nor their defaults
    given = {argument.name: argument.default_value for argument in left if argument.has_default_value()} | kwargs
    if given.keys() != {argument.name for argument in left}:
        return _call_script(fresh, *args, **kwargs)  # raises
    return _call_script(fresh, *args, *(given[argument.name] for argument in left))
