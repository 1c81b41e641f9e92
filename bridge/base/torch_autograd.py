"""Torch's private names about ``autograd.Function``, its nodes, and the backward that is on its way in this thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bridge.base.torch_internals import find

__all__ = ["FUNCTION_BASE", "GENERATED", "FunctionNode", "apply_function", "keeps_graph", "node_class"]

FUNCTION_BASE: type = find("torch.autograd.function._SingleLevelFunction")
"""The class behind ``torch.autograd.Function`` that its ``apply`` goes on to, or inherits it from."""

FunctionNode: type = torch.autograd.function.BackwardCFunction
"""The class of a Function's node in autograd's graph, which is the ``ctx`` of its forward and backward."""

GENERATED = "GeneratedBackwardFor_"
"""How the names of Functions begin that torch makes for operators with derivatives in Python."""


keeps_graph: Callable[[], bool] = find("torch._C._autograd._get_current_graph_task_keep_graph")
"""Whether the graph is retained; true outside of a backward."""


def node_class(kind: type) -> type:
    """The class of the nodes of a Function in autograd's graph."""
    return kind._backward_cls


def apply_function(kind: type, args: tuple, kwargs: dict[str, Any]) -> Any:
    """What ``kind.apply(*args, **kwargs)`` does, past :data:`FUNCTION_BASE`."""
    return super(FUNCTION_BASE, kind).apply(*args, **kwargs)
