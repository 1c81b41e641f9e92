"""Torch's private names about ``autograd.Function``, its nodes, and the backward that is on its way in this thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from bridge.base.torch_internals import find

__all__ = [
    "GENERATED",
    "FunctionNode",
    "applications_through",
    "apply_function",
    "keeps_graph",
    "no_torch_dispatch",
    "node_class",
]

_IN_PYTHON = isinstance(vars(torch.autograd.Function).get("apply"), classmethod)
FUNCTION_BASE: type = find("torch.autograd.function._SingleLevelFunction") if _IN_PYTHON else torch.autograd.Function
"""The class whose ``apply`` every application passes: up to torch 2.13 the one that ``Function.apply`` goes on to;
later that is C code, and an ``apply`` that was looked up before passes by."""

FunctionNode: type = torch.autograd.function.BackwardCFunction
"""The class of a Function's node in autograd's graph, which is the ``ctx`` of its forward and backward."""

GENERATED = "GeneratedBackwardFor_"
"""How the names of Functions begin that torch makes for operators with derivatives in Python."""


keeps_graph: Callable[[], bool] = find("torch._C._autograd._get_current_graph_task_keep_graph")
"""Whether the graph is retained; true outside of a backward."""


no_torch_dispatch: Callable[[], AbstractContextManager] = find("torch._C._DisableTorchDispatch", nullcontext)
"""While active, no dispatch mode sees operators on plain tensors."""


def node_class(kind: type) -> type:
    """The class of the nodes of a Function in autograd's graph."""
    return kind._backward_cls


@contextmanager
def applications_through(apply: Callable[..., Any]) -> Iterator[None]:
    """While active, ``apply(kind, *args, **kwargs)`` is called where a Function is applied, in any thread."""
    before = vars(FUNCTION_BASE).get("apply")
    FUNCTION_BASE.apply = classmethod(apply)
    try:
        yield
    finally:
        if before is None:
            del FUNCTION_BASE.apply
        else:
            FUNCTION_BASE.apply = before


def apply_function(kind: type, args: tuple, kwargs: dict[str, Any]) -> Any:
    """What ``kind.apply(*args, **kwargs)`` does, past :data:`FUNCTION_BASE`."""
    return super(FUNCTION_BASE, kind).apply(*args, **kwargs)
