"""Modes of the interpreter: autocast's setting as one value; modes that a run leaves changed are put back.

All modes that a guard compares are listed in :mod:`bridge.dispatch.guards.interpreter`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.distributions import Distribution

from bridge.base.devices import HOST
from bridge.base.torch_internals import set_grad_enabled

__all__ = [
    "ambient_autocast",
    "autocast_depth",
    "autocast_setting",
    "autocast_to",
    "distributions_validate",
    "modes_put_back",
]

_HOST = HOST.type


def ambient_autocast() -> torch.dtype | None:
    """The element type that the host's autocast casts to where this is called; ``None`` if it is off."""
    return torch.get_autocast_dtype(_HOST) if torch.is_autocast_enabled(_HOST) else None


def autocast_to(dtype: torch.dtype | None, *, cache_enabled: bool | None = None) -> torch.autocast:
    """A context in which the host's autocast casts to this type; ``None``: in which it is off."""
    return torch.autocast(_HOST, dtype=dtype, enabled=dtype is not None, cache_enabled=cache_enabled)


def autocast_setting() -> torch.dtype | str | bool:
    """All that matters of the host's autocast: ``False`` or the type that it casts to; in words if it caches none."""
    if not torch.is_autocast_enabled(_HOST):
        return False
    dtype = torch.get_autocast_dtype(_HOST)
    return dtype if torch.is_autocast_cache_enabled() else f"{dtype} (cache_enabled=False)"


def distributions_validate() -> bool | None:
    """Whether ``torch.distributions`` check their arguments unless told otherwise; Dynamo switches that off."""
    return getattr(Distribution, "_validate_args", None)


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
    "autocast": (partial(torch.is_autocast_enabled, _HOST), partial(torch.set_autocast_enabled, _HOST)),
}
