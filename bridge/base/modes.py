"""Modes of the interpreter: autocast's setting as one value; modes that a run leaves changed are restored.

:mod:`bridge.dispatch.guards.interpreter` lists all modes that a guard compares.

Replaced attributes: (an owner, values by name) → set while active, restored afterwards.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch.distributions import Distribution

from bridge.base.devices import HOST, current_device
from bridge.base.torch_internals import set_grad_enabled

_HOST, _CUDA = HOST.type, "cuda"


def ambient_autocast() -> torch.dtype | None:
    """The dtype that autocast casts to here; ``None`` if it is off.

    Here and below, autocast is that of :func:`bridge.base.devices.current_device`.
    """
    kind = current_device().type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def autocast_to(
    dtype: torch.dtype | None, *, kind: str | None = None, cache_enabled: bool | None = None
) -> torch.autocast:
    """A context in which autocast casts to this dtype; ``None``: in which it is off. ``kind``: another device type."""
    return torch.autocast(
        kind or current_device().type, dtype=dtype, enabled=dtype is not None, cache_enabled=cache_enabled
    )


def autocast_setting(kind: str = _HOST) -> torch.dtype | str | bool:
    """A device type's autocast setting: ``False``, or the dtype that it casts to; a string if its cache is off.

    By default the host's.
    """
    if not torch.is_autocast_enabled(kind):
        return False
    dtype = torch.get_autocast_dtype(kind)
    return dtype if torch.is_autocast_cache_enabled() else _uncached(dtype)


cuda_autocast_setting = partial(autocast_setting, _CUDA)
"""CUDA's autocast setting."""


def autocast_settings(kind: str) -> tuple[torch.dtype | str | bool, ...]:
    """The possible values of a device type's autocast setting, its present value first."""
    now = autocast_setting(kind)
    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    return tuple(dict.fromkeys((now, False, *dtypes, *(_uncached(dtype) for dtype in dtypes))))


def _uncached(dtype: torch.dtype) -> str:
    return f"{dtype} (cache_enabled=False)"


distributions_validate: Callable[[], bool | None] = partial(getattr, Distribution, "_validate_args", None)
"""The default argument validation of ``torch.distributions``; Dynamo switches it off."""


@contextmanager
def modes_put_back() -> Iterator[list[str]]:
    """Restores torch's modes that the code inside leaves changed, and yields the list of their names."""
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
    """While active, these attributes of ``owner`` have these values; afterwards, a class inherits again."""
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


def while_active(owner: Any, **values: Any) -> AbstractContextManager[None]:
    """:func:`replaced` for an object of this package, whose attributes tell a state that lasts for a while."""
    return replaced(owner, **values)


@contextmanager
def replaced_here(owner: Any, **made: Callable[[Any], Callable[..., Any]]) -> Iterator[None]:
    """While active, this thread calls other functions by these names of ``owner``; other threads call the originals.

    ``made``: name → (the original → this thread's function).
    """
    thread = threading.get_ident()

    def of_thread(original: Any, own: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: (own if threading.get_ident() == thread else original)(*args, **kwargs)

    originals = {name: getattr(owner, name) for name in made}
    with replaced(owner, **{name: of_thread(each, made[name](each)) for name, each in originals.items()}):
        yield
