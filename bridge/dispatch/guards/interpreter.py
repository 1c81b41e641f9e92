"""Conditions on the interpreter: torch's global modes that change what a module computes.

Conditions on torch's settings for CUDA: how its kernels round, and which of them it takes; of entries on a GPU.

Library calls follow the settings when they run, as eager does; what was chosen when the graph was traced does not.
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
        name: in the words of a failure.
        read: its value now, comparable with ``==``; a function in C where possible, since every call asks.
        show: that value as it is told.
        is_capturable: whether a call can be captured while the mode is on.
        is_on: a function in C that gives what ``read`` does where the mode is off, and something true elsewhere.
    """

    name: str
    read: Callable[[], Any]
    show: Callable[[Any], Any] = _as_it_is
    is_capturable: bool = False
    is_on: Callable[[], Any] | None = None


_CUDA_MODES = (
    Mode("CUDA autocast", cuda_autocast_setting, is_capturable=True, is_on=partial(torch.is_autocast_enabled, "cuda")),
)
"""Of torch's CUDA builds."""

MODES = (
    Mode("grad mode", torch.is_grad_enabled, is_capturable=True),
    Mode("inference mode", torch.is_inference_mode_enabled, is_capturable=True),
    Mode("autocast", autocast_setting, is_capturable=True, is_on=partial(torch.is_autocast_enabled, HOST.type)),
    Mode("default dtype", torch.get_default_dtype, is_capturable=True),
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
    """The global state that changes what a module computes: name and value of each mode, of each
    setting for CUDA where that is in use."""
    values = [mode.read() for mode in MODES]
    for i, show in _SHOWN:
        values[i] = show(values[i])
    settings = SETTINGS.items() if torch.cuda.is_initialized() else ()
    return (*zip(_NAMES, values, strict=True), *((name, str(read())) for name, read in settings))


def active_modes() -> list[str]:
    """Names of the modes that are on and under which no call can be captured: a default device is none of them."""
    values = [(mode, mode.read()) for mode in MODES if not mode.is_capturable]
    return [mode.name for mode, value in values if mode.show(value) and not isinstance(value, torch.device)]


class ModeGuard:
    """The conditions of one entry on some modes: the values of now, and those that make no difference to it.

    Args:
        modes: which; ``accepted``: the values of each, the present one first.

    Attributes:
        exact: whether the grad mode has to be the very one.
    """

    def __init__(self, modes: Sequence[Mode], accepted: Sequence[Sequence[Any]], exact: bool = False):
        self._modes, self._accepted, self.exact = modes, accepted, exact
        self._states = tuple(product(*accepted))

    @property
    def expected(self) -> dict[str, Any]:
        """The modes that the entry was made under, by name."""
        return {mode.name: values[0] for mode, values in zip(self._modes, self._accepted, strict=True)}

    def write(self, source: CheckSource, kind: str) -> None:
        """Writes the conditions; leaves the values in a variable of this name."""
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
    """Without gradients, ``no_grad`` and ``inference_mode`` are the same to the code; where nothing requires a
    gradient, whether they are enabled is nothing to it either. The autocast of other devices casts nothing of its own.

    Args:
        requires_grad: whether some input requires a gradient.
        exact: whether the module's code asks for the grad mode, and so may do different things.
        reads_validation: whether the call asked if ``torch.distributions`` check arguments; Dynamo switches that off.
        device: of its tensors.
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
    """The settings mean the same as those of now, on a GPU."""
    settle_attention_order(device)  # or an entry would miss from the first attention on, whoever calls it
    settings = [Mode(name, read) for name, read in SETTINGS.items()]
    return ModeGuard(settings, [meaning_the_same(mode.read()) for mode in settings])
