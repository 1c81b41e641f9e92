"""Checkpoints that are not reentrant: what ``torch.utils.checkpoint`` keeps of the one that this thread runs."""

from __future__ import annotations

from typing import Any

from bridge.base.torch_internals import find, saved_tensors_hooks

__all__ = ["checkpoint_frame", "is_computed_again", "puts_generators_back"]

_HOOKS = find("torch.utils.checkpoint._checkpoint_hook")


def checkpoint_frame() -> Any:
    """What the innermost checkpoint in this thread keeps for its second run; ``None`` outside of one."""
    hooks = saved_tensors_hooks()
    if hooks is None or not getattr(hooks[0], "__qualname__", "").startswith(f"{_HOOKS.__name__}."):
        return None
    return _captured(hooks[0], "frame")


def is_computed_again(frame: Any) -> bool:
    """Whether the backward runs the function again: something of it was saved."""
    return bool(frame.weak_holders)


def puts_generators_back(frame: Any) -> bool:
    """Whether the second run draws what the first one drew (``preserve_rng_state``)."""
    return _captured(frame.recompute_fn, "preserve_rng_state") is True


def _captured(function: Any, name: str) -> Any:
    """The value of a variable of an enclosing scope that a function reads; ``None`` if it reads no such one."""
    names = function.__code__.co_freevars
    return function.__closure__[names.index(name)].cell_contents if name in names else None
