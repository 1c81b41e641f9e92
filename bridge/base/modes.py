"""Modes of the interpreter: torch's settings, process- or thread-wide, that change what a module computes.

Read all of them (a guard compares them), read autocast's, or put back those that a run leaves changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from bridge.base.torch_internals import (
    forward_ad_is_on,
    has_global_hooks,
    len_dispatch_stack,
    len_function_stack,
    set_grad_enabled,
    transforms_are_on,
)

__all__ = [
    "MODES",
    "ambient_autocast",
    "autocast_depth",
    "autocast_setting",
    "interpreter_state",
    "mode_values",
    "modes_put_back",
]

MODES = (
    "grad mode",
    "inference mode",
    "autocast",
    "default dtype",
    "deterministic algorithms",
    "forward-mode differentiation",
    "torch dispatch mode",
    "torch function mode",
    "functorch transform",
    "global module hooks",
)
"""Names of the modes, in the order of :func:`mode_values`."""


def interpreter_state() -> tuple[tuple[str, Any], ...]:
    """() → pairs of a mode's name and its value."""
    return tuple(zip(MODES, mode_values(), strict=True))


def mode_values() -> tuple[Any, ...]:
    """() → the values of :data:`MODES`, in their order; of autocast, :func:`autocast_setting`."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu") and autocast_setting(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        forward_ad_is_on(),
        len_dispatch_stack() > 0,
        len_function_stack() > 0,
        transforms_are_on(),
        has_global_hooks(),
    )


def ambient_autocast() -> torch.dtype | None:
    """The element type that the CPU's autocast casts to where this is called; ``None`` if it is off."""
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None


def autocast_setting() -> torch.dtype | str | bool:
    """All that matters of the CPU's autocast: ``False`` or the type that it casts to; in words if it caches no cast."""
    if not torch.is_autocast_enabled("cpu"):
        return False
    dtype = torch.get_autocast_dtype("cpu")
    return dtype if torch.is_autocast_cache_enabled() else f"{dtype} (cache_enabled=False)"


def autocast_depth() -> int:
    """How many autocast contexts this place is in: torch tells only where one is left."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


@contextmanager
def modes_put_back() -> Iterator[list[str]]:
    """Undoes what runs inside do to torch's modes and leave so, and collects the names of those modes."""
    before = {mode: get() for mode, (get, _) in _SETTABLE.items()}
    changed: list[str] = []
    try:
        yield changed
    finally:
        changed += [mode for mode, (get, _) in _SETTABLE.items() if get() != before[mode]]
        for mode in changed:
            _SETTABLE[mode][1](before[mode])


_SETTABLE: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "grad mode": (torch.is_grad_enabled, set_grad_enabled),
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "deterministic algorithms": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    "autocast": (partial(torch.is_autocast_enabled, "cpu"), partial(torch.set_autocast_enabled, "cpu")),
}
