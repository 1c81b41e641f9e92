"""TorchScript functions: called operator by operator, whatever was fused in earlier calls.

Like :mod:`bridge.base.torch_internals`, and for the same lint test: no other file names what is private here.
"""

from __future__ import annotations

from typing import Any

import torch

from bridge.base.torch_internals import find

__all__ = ["ScriptFunction", "run_unfused"]

ScriptFunction: type = torch.jit.ScriptFunction
_call_script = ScriptFunction.__call__
_function_of_graph = find("torch._C._create_function_from_graph")


def run_unfused(function: Any, *args: Any, fakes: bool, **kwargs: Any) -> Any:
    """A TorchScript function's results, from its operators one by one, whatever has been optimized in its calls so far.

    A function's first call is made like that: it is a new one of the same graph. Not so on real tensors, if the graph
    holds tensors itself, as a traced one does: in a first call under a mode torch does not read those.

    Args:
        fakes: whether it is called with fake tensors.
    """
    constants = () if fakes else (node for node in function.graph.nodes() if node.kind() == "prim::Constant")
    if any(node.hasAttribute("value") and node.kindOf("value") == "t" for node in constants):
        return _call_script(function, *args, **kwargs)
    fresh = _function_of_graph(function.name, function.graph)
    left = function.schema.arguments[len(args) :]  # a graph knows neither their names nor defaults
    given = {argument.name: argument.default_value for argument in left if argument.has_default_value()} | kwargs
    if given.keys() != {argument.name for argument in left}:
        return _call_script(fresh, *args, **kwargs)  # raises
    return _call_script(fresh, *args, *(given[argument.name] for argument in left))
