"""Conditions on the interpreter: torch's global modes that affect a module's results; on a GPU, torch's CUDA settings.

CUDA settings select kernels and their rounding. Library calls follow the settings at run time, as eager does; choices
made while tracing do not, so the settings are guards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch

from bridge.base.devices import HOST, function_modes
from bridge.base.errors import INTERPRETER, GuardFailure
from bridge.base.modes import autocast_setting, autocast_settings, cuda_autocast_setting, distributions_validate
from bridge.base.torch_cuda import SETTINGS, meaning_the_same, settle_attention_order
from bridge.base.torch_internals import (
    deterministic_algorithms,
    forward_ad_level,
    has_global_hooks,
    innermost_transform,
    len_dispatch_stack,
    len_function_stack,
    parametrization_caches,
)
from bridge.dispatch.guards.condition import CheckSource, differs

__all__ = ["INFERENCE", "MODES", "Mode", "ModeGuard", "active_modes", "interpreter_state", "modes_as_now"]
__all__ += ["settings_as_now"]


def _as_it_is(value: Any) -> Any:
    return value


def _default_device(modes: int | torch.device) -> bool | str:
    return f"default device {modes}" if isinstance(modes, torch.device) else bool(modes)


@dataclass(frozen=True)
class Mode:
    """One global mode.

    Attributes:
        name: its name in messages.
        read: returns its value, comparable with ``==``; a function in C if possible, since it runs at every call.
        show: the value → its form in messages.
        is_capturable: whether a call can be captured while the mode is on.
        is_on: a function in C that returns ``read``'s value if the mode is off, else a true value.
    """

    name: str
    read: Callable[[], Any]
    show: Callable[[Any], Any] = _as_it_is
    is_capturable: bool = False
    is_on: Callable[[], Any] | None = None


_CUDA_MODES = (
    Mode("CUDA autocast", cuda_autocast_setting, is_capturable=True, is_on=partial(torch.is_autocast_enabled, "cuda")),
)

MODES = (
    Mode("grad mode", torch.is_grad_enabled, is_capturable=True),
    Mode("inference mode", torch.is_inference_mode_enabled, is_capturable=True),
    Mode("autocast", autocast_setting, is_capturable=True, is_on=partial(torch.is_autocast_enabled, HOST.type)),
    Mode("default dtype", torch.get_default_dtype, is_capturable=True),
    Mode("numbers below the smallest normal one", (5e-324).__bool__, is_capturable=True),
    Mode("deterministic algorithms", deterministic_algorithms, is_capturable=True),
    Mode("validation of distributions", distributions_validate, is_capturable=True),
    Mode("forward-mode differentiation", forward_ad_level, lambda level: level >= 0),
    Mode("torch dispatch mode", len_dispatch_stack, bool),
    Mode("torch function mode", function_modes, _default_device, is_on=len_function_stack),
    Mode("functorch transform", innermost_transform, lambda innermost: innermost is not None),
    Mode("global module hooks", has_global_hooks),
    Mode("parametrize.cached()", parametrization_caches, bool),
    *(_CUDA_MODES if torch.backends.cuda.is_built() else ()),
)
_NAMES = [mode.name for mode in MODES]
GRAD, INFERENCE, VALIDATION = map(_NAMES.index, ("grad mode", "inference mode", "validation of distributions"))
_AUTOCAST = {HOST.type: _NAMES.index("autocast")} | (
    {"cuda": _NAMES.index("CUDA autocast")} if torch.backends.cuda.is_built() else {}
)
_SHOWN = [(i, mode.show) for i, mode in enumerate(MODES) if mode.show is not _as_it_is]


def interpreter_state() -> tuple[tuple[str, Any], ...]:
    """The global state that affects a module's results: name and value of each mode, and of each CUDA setting once CUDA
    is initialized."""
    values = [mode.read() for mode in MODES]
    for i, show in _SHOWN:
        values[i] = show(values[i])
    settings = SETTINGS.items() if torch.cuda.is_initialized() else ()
    return (*zip(_NAMES, values, strict=True), *((name, str(read())) for name, read in settings))


def active_modes() -> list[str]:
    """Names of the active modes that forbid a capture; a default device does not."""
    values = [(mode, mode.read()) for mode in MODES if not mode.is_capturable]
    return [mode.name for mode, value in values if mode.show(value) and not isinstance(value, torch.device)]


class ModeGuard:
    """The conditions of one entry on some modes: the current values, and values that are equivalent for it.

    Args:
        modes: the modes; ``accepted``: the accepted values of each, the current one first.

    Attributes:
        exact: whether the grad mode has to be the current one.
    """

    def __init__(self, modes: Sequence[Mode], accepted: Sequence[Sequence[Any]], exact: bool = False):
        self._modes, self._accepted, self.exact = modes, accepted, exact
        self._states = tuple(product(*accepted))

    @property
    def expected(self) -> dict[str, Any]:
        """Name → value of the modes under which the entry was compiled."""
        return {mode.name: values[0] for mode, values in zip(self._modes, self._accepted, strict=True)}

    def write(self, source: CheckSource, kind: str) -> None:
        """Writes the conditions; the generated code assigns the values to the variable ``kind``."""
        reads = []
        for mode in self._modes:
            read = f"{source.name(mode.read, mode.name)}()"
            reads.append(f"{source.name(mode.is_on, f'{mode.name} is on')}() and {read}" if mode.is_on else read)
        source.add(f"{kind} = (", *(f"    {read}," for read in reads), ")")
        states, failure = source.name(self._states, f"accepted {kind}"), source.name(self.failure, f"other {kind}")
        source.refuse(f"{kind} not in {states}", f"{failure}({kind})")

    def failure(self, state: tuple[Any, ...]) -> GuardFailure | None:
        """The first mode whose value is not accepted; ``None`` if all are."""
        for mode, value, accepted in zip(self._modes, state, self._accepted, strict=True):
            if value not in accepted:
                return differs(INTERPRETER, mode.name, mode.show(accepted[0]), mode.show(value))
        return None


def modes_as_now(requires_grad: bool, exact: bool, reads_validation: bool, device: torch.device = HOST) -> ModeGuard:
    """The conditions on the modes: their current values, and equivalent ones.

    Without gradients, ``no_grad`` and ``inference_mode`` are equivalent; if no input requires grad, so is enabled grad
    mode. Autocast of another device casts none of the entry's tensors.

    Args:
        requires_grad: whether some input requires a gradient.
        exact: whether the module's code reads the grad mode, so that it may depend on it.
        reads_validation: whether the call read torch.distributions' validation flag, which Dynamo turns off.
        device: the device of the entry's tensors.
    """
    now = [mode.read() for mode in MODES]
    accepted: list[Sequence[Any]] = [(value,) for value in now]
    if not exact and not requires_grad:
        accepted[GRAD] = (now[GRAD], not now[GRAD])
    if not exact and not (now[GRAD] and requires_grad):
        accepted[INFERENCE] = (now[INFERENCE], not now[INFERENCE])
    if not reads_validation:
        accepted[VALIDATION] = (now[VALIDATION], not now[VALIDATION])
    for kind, place in _AUTOCAST.items():
        if kind != device.type:
            accepted[place] = autocast_settings(kind)
    return ModeGuard(MODES, accepted, exact)


def settings_as_now(device: torch.device) -> ModeGuard:
    """The conditions on torch's CUDA settings: their current values, and equivalent ones."""
    settle_attention_order(device)  # or the first attention call, which changes it, would make all entries miss
    settings = [Mode(name, read) for name, read in SETTINGS.items()]
    return ModeGuard(settings, [meaning_the_same(mode.read()) for mode in settings])
