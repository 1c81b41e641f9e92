"""Torch's private names of ``autograd.Function``, its nodes, and the backward that runs in this thread.

Non-reentrant checkpoints: the state that ``torch.utils.checkpoint`` keeps of this thread's innermost one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from bridge.base.quirks import quirk
from bridge.base.torch_internals import find, saved_tensors_hooks

_IN_PYTHON = isinstance(vars(torch.autograd.Function).get("apply"), classmethod)
FUNCTION_BASE: type = find("torch.autograd.function._SingleLevelFunction") if _IN_PYTHON else torch.autograd.Function
"""The class whose ``apply`` every application passes: ``Function.apply`` calls it, where it is Python."""

FunctionNode: type = torch.autograd.function.BackwardCFunction
"""The class of a Function's node in autograd's graph, which is the ``ctx`` of its forward and backward."""

GENERATED = "GeneratedBackwardFor_"
"""Prefix of the Functions that torch makes for operators with derivatives in Python."""

keeps_graph: Callable[[], bool] = find("torch._C._autograd._get_current_graph_task_keep_graph")
"""Whether the graph is retained; true outside of a backward."""

no_torch_dispatch: Callable[[], AbstractContextManager] = find("torch._C._DisableTorchDispatch", nullcontext)
"""While active, no dispatch mode sees operators on plain tensors."""


def node_class(kind: type) -> type:
    """The class of the nodes of a Function in autograd's graph."""
    return kind._backward_cls


@quirk(
    "torch.autograd.Function.apply",
    reason="is C code; one that was looked up before passes by",
    test="tests/bridge/capture/test_custom_functions.py",
    since="2.14",
)
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
    """Calls ``kind.apply(*args, **kwargs)``, past :data:`FUNCTION_BASE`."""
    return super(FUNCTION_BASE, kind).apply(*args, **kwargs)


_HOOKS = find("torch.utils.checkpoint._checkpoint_hook")


def checkpoint_frame() -> Any:
    """The state that the innermost checkpoint in this thread keeps for its second run; ``None`` outside of one."""
    hooks = saved_tensors_hooks()
    if hooks is None or not getattr(hooks[0], "__qualname__", "").startswith(f"{_HOOKS.__name__}."):
        return None
    return _captured(hooks[0], "frame")


def is_computed_again(frame: Any) -> bool:
    """Whether the backward runs the function again: one of its tensors was saved."""
    return bool(frame.weak_holders)


def puts_generators_back(frame: Any) -> bool:
    """Whether the second run repeats the random draws of the first one (``preserve_rng_state``)."""
    return _captured(frame.recompute_fn, "preserve_rng_state") is True


def _captured(function: Any, name: str) -> Any:
    """The value of a function's closure variable; ``None`` if it has none of that name."""
    names = function.__code__.co_freevars
    return function.__closure__[names.index(name)].cell_contents if name in names else None


def applied(function: type[torch.autograd.Function], **attributes: Any) -> Callable[..., Any]:
    """``function.apply`` without its search for functorch's wrappers in each argument: the guard has excluded them.

    Its nodes call ``function.backward`` without torch's search for ``vjp``. ``attributes``: of nodes that set no other.
    """
    for name, value in {"apply": function.backward, **attributes}.items():
        setattr(node_class(function), name, value)
    return super(torch.autograd.Function, function).apply
