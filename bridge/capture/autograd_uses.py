"""Uses of autograd in forward that no graph holds: hooks on tensors, ``.grad``, packed saved tensors, derivatives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bridge.base.torch_internals import (
    forward_ad_level,
    saved_tensors_hooks,
)

__all__ = ["use_of_autograd"]

_HOOKS = ("register_hook", "retain_grad", "register_post_accumulate_grad_hook")
_ELSEWHERE = "do it around the call, in the training loop"


def use_of_autograd(
    func: Any, name: str, args: Sequence[Any], without: dict[int, torch.Tensor]
) -> tuple[str, str, str | None] | None:
    """What a call of a torch function, of this name, does that a compiled call would not: operation, reason, hint.

    ``without``: is told of tensors that have no ``.grad``, which is a condition (:mod:`bridge.guards.tensor_reads`).
    """
    if name in _HOOKS:
        return f"Tensor.{name}", "a tensor hook set inside forward", None
    if name in ("__get__", "__set__", "__delete__") and getattr(func, "__self__", None) is torch.Tensor.grad:
        if name == "__get__" and func(*args) is None:
            without[id(args[0])] = args[0]
            return None
        return "Tensor.grad", "gradients from earlier calls, read or changed inside forward", _ELSEWHERE
    if forward_ad_level() >= 0:
        return "torch.func or forward_ad", "dual numbers inside forward", None
    hooks = saved_tensors_hooks()
    if hooks is not None and not _is_known(hooks[0]):
        reason = "changes what autograd saves by functions of its own; a compiled call saves what its partition says"
        return "torch.autograd.graph.saved_tensors_hooks", reason, "use it around the call"
    return None


def _is_known(pack: Any) -> bool:
    """Whether a function of saved tensors gives back the same numbers: those of checkpoints and ``save_on_cpu`` do."""
    return (getattr(pack, "__module__", None) or "").partition(".")[0] in ("torch", "bridge")
