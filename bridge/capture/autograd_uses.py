"""Uses of autograd in forward that no graph holds: hooks on tensors, ``.grad``, packed saved tensors, derivatives."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from bridge.base.devices import TYPES
from bridge.base.errors import Unsupported, user_line
from bridge.base.threads import stack_of
from bridge.base.torch_internals import (
    TorchDispatchMode,
    current_graph_task_id,
    forward_ad_level,
    innermost_transform,
    saved_tensors_hooks,
)

__all__ = ["derivatives_noted", "state_of_autograd", "use_of_autograd"]

_HOOKS = ("register_hook", "retain_grad", "register_post_accumulate_grad_hook")
_ELSEWHERE = "do it around the call, in the training loop"


def state_of_autograd() -> tuple:
    """What :func:`use_of_autograd` depends on beside the function, in this thread; grad mode and autocast, too."""
    modes = torch.is_grad_enabled(), *map(torch.is_autocast_enabled, TYPES)
    return forward_ad_level(), saved_tensors_hooks(), modes


def use_of_autograd(func: Any, name: str) -> tuple[str, str, str | None] | None:
    """What a call of a torch function, of this name, does that a compiled call would not: operation, reason, hint."""
    if name in _HOOKS:
        return f"Tensor.{name}", "a tensor hook set inside forward", None
    if name in ("__get__", "__set__", "__delete__") and getattr(func, "__self__", None) is torch.Tensor.grad:
        return "Tensor.grad", "gradients from earlier calls, read or changed inside forward", _ELSEWHERE
    if forward_ad_level() >= 0:
        return "torch.func or forward_ad", "dual numbers inside forward; torch.export traces none", None
    hooks = saved_tensors_hooks()
    if hooks is not None and not _is_known(hooks[0]):
        reason = "changes what autograd saves by functions of its own; a compiled call saves what its partition says"
        return "torch.autograd.graph.saved_tensors_hooks", reason, "use it around the call"
    return None


def _is_known(pack: Any) -> bool:
    """Whether a function of saved tensors gives back the same numbers: those of checkpoints and ``save_on_cpu`` do."""
    return (getattr(pack, "__module__", None) or "").partition(".")[0] in ("torch", "bridge")


class _Found(list[Unsupported]):
    """The first derivative that is found, with the user's line: in the thread at hand, whichever runs a backward."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    def note(self, op: str, reason: str) -> None:
        if not self:
            where = user_line(stack_of(self._thread)) or "forward"
            hint = "dispatch the submodules whose derivatives forward does not take, or leave this module to PyTorch"
            self.append(Unsupported(op, where, reason, hint))


class _Operators(TorchDispatchMode):
    """Notes that an operator runs in a backward that forward itself starts."""

    def __init__(self, found: _Found):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if current_graph_task_id() != -1:
            reason = "a derivative with respect to what forward computes; torch.export traces none"
            self.found.note("torch.autograd.grad or backward inside forward", reason)
        return func(*args, **(kwargs or {}))


class _Functions(TorchFunctionMode):
    """Notes that a torch function is called inside a transform of ``torch.func`` or on dual numbers."""

    def __init__(self, found: _Found):
        super().__init__()
        self.found = found

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if innermost_transform() is not None or forward_ad_level() >= 0:
            reason = "a transform (grad, vmap, jvp, …) inside forward; torch.export traces none"
            self.found.note("torch.func or forward_ad", reason)
        return func(*args, **(kwargs or {}))


@contextmanager
def derivatives_noted() -> Iterator[list[Unsupported]]:
    """While active, the first derivative that the code computes itself is put into the list, with the user's line."""
    found = _Found()
    with _Functions(found), _Operators(found):
        yield found
