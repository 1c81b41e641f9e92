"""Modes of the interpreter: autocast's setting as one value; modes that a run leaves changed are put back.

All modes that a guard compares are listed in :mod:`bridge.dispatch.guards.interpreter`.

Replaced attributes: an owner and values by name → set while active, put back afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.distributions import Distribution

from bridge.base.devices import HOST, current_device
from bridge.base.torch_internals import set_grad_enabled

__all__ = ["ambient_autocast", "autocast_setting", "autocast_settings", "autocast_to", "cuda_autocast_setting"]
__all__ += ["distributions_validate", "modes_put_back", "replaced"]

_HOST, _CUDA = HOST.type, "cuda"


def ambient_autocast() -> torch.dtype | None:
    """The element type that autocast casts to where this is called; ``None`` if it is off.

    Autocast is that of :func:`bridge.base.devices.current_device`, here and below.
    """
    kind = current_device().type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def autocast_to(dtype: torch.dtype | None, *, cache_enabled: bool | None = None) -> torch.autocast:
    """A context in which autocast casts to this type; ``None``: in which it is off."""
    kind = current_device().type
    return torch.autocast(kind, dtype=dtype, enabled=dtype is not None, cache_enabled=cache_enabled)


def autocast_setting(kind: str = _HOST) -> torch.dtype | str | bool:
    """All that matters of the autocast of a type of devices: ``False`` or what it casts to; in words if it caches none.

    Of the host's unless told otherwise.
    """
    if not torch.is_autocast_enabled(kind):
        return False
    dtype = torch.get_autocast_dtype(kind)
    return dtype if torch.is_autocast_cache_enabled() else _uncached(dtype)


cuda_autocast_setting = partial(autocast_setting, _CUDA)
"""That of CUDA's."""


def autocast_settings(kind: str) -> tuple[torch.dtype | str | bool, ...]:
    """What the setting of a type of devices may be; any other that there is is one that is asked for by name."""
    now = autocast_setting(kind)
    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    return tuple(dict.fromkeys((now, False, *dtypes, *(_uncached(dtype) for dtype in dtypes))))


def _uncached(dtype: torch.dtype) -> str:
    return f"{dtype} (cache_enabled=False)"


distributions_validate: Callable[[], bool | None] = partial(getattr, Distribution, "_validate_args", None)
"""Whether ``torch.distributions`` check their arguments unless told otherwise; Dynamo switches that off."""


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
    "autocast": (lambda: torch.is_autocast_enabled(_HOST), lambda on: torch.set_autocast_enabled(_HOST, on)),
    "CUDA autocast": (lambda: torch.is_autocast_enabled(_CUDA), lambda on: torch.set_autocast_enabled(_CUDA, on)),
}


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """While active, the attributes of ``owner`` that ``values`` names have those values; a class inherits again."""
    inherited = {name for name in values if isinstance(owner, type) and name not in vars(owner)}
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            if name in inherited:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
