"""Devices: those of a call's tensors → the one that the call is captured, lowered and compiled for.

Constants are computed on the host. A thread that captures or lowers a call works for the device of the call's tensors
(:func:`working_for`): its autocast is the one that counts.

Default device (``torch.set_default_device``, ``with torch.device(...)``) → one value to compare; kept to forward.

torch has a function mode that gives a device to every factory that is called without one, whoever calls it. A capture
runs forward with the mode, and its own work, constants of the host among it, without.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import CodeType, FrameType
from typing import Any

import torch

from bridge.base.torch_internals import find, len_function_stack

__all__ = ["HOST", "TYPES", "current_device", "default_device_of_forward", "device_named", "devices_of"]
__all__ += ["function_modes", "function_modes_aside", "may_be_on_host", "name_of", "working_for"]

HOST = torch.device("cpu")

TYPES = ("cpu", "cuda")
"""Types of devices that there is a backend for."""

_CURRENT = ContextVar("bridge_device", default=HOST)


def current_device() -> torch.device:
    """The device of the call that this thread captures or lowers; the host where it does neither."""
    return _CURRENT.get()


@contextmanager
def working_for(device: torch.device) -> Iterator[None]:
    """A context in which :func:`current_device` is the given one."""
    token = _CURRENT.set(device)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def devices_of(tensors: Iterable[torch.Tensor]) -> list[torch.device]:
    """The devices of tensors, in order, each once."""
    return list(dict.fromkeys(tensor.device for tensor in tensors))


def may_be_on_host(tensor: torch.Tensor) -> bool:
    """Whether an argument beside a GPU's tensors may lie on the host: integers of one dimension or more."""
    is_number = tensor.is_floating_point() or tensor.is_complex()
    return not is_number and tensor.dim() > 0


_WORKED_FOR = "current"


def name_of(device: torch.device) -> str:
    """A device's name in what is kept: the GPU that this thread works for has the same name on every rank."""
    return _WORKED_FOR if device == current_device() != HOST else str(device)


def device_named(name: str) -> torch.device:
    """The device that :func:`name_of` gave this name, for a thread that works for another one of the kind."""
    return current_device() if name == _WORKED_FOR else torch.device(name)


_DeviceContext: type = find("torch.utils._device.DeviceContext")
_constructors: Callable[[], set] = find("torch.utils._device._device_constructors")
_stack_at: Callable[[int], Any] = find("torch._C._get_function_stack_at")
_pop: Callable[[], Any] = find("torch._C._pop_torch_function_stack")
_push: Callable[[Any], None] = find("torch._C._push_on_torch_function_stack")


def function_modes() -> int | torch.device:
    """0 if no torch function mode changes anything; the default device if nothing else does; else how many there are.

    The host as the default device is as none.
    """
    count = len_function_stack()
    if not count:
        return 0
    device = _default_device(count)
    if device is None:
        return count
    return 0 if device.type == HOST.type else device


def _default_device(count: int) -> torch.device | None:
    """That of so many modes, if all of them give one: what the last says, the others find said already."""
    modes = [_stack_at(place) for place in range(count)]
    if not modes or not all(isinstance(mode, _DeviceContext) for mode in modes):
        return None
    device = modes[-1].device
    if device.type == "cuda" and device.index is None:  # the current one, which fake tensors do not ask for
        return torch.device("cuda", torch.cuda.current_device())
    return device


@contextmanager
def default_device_of_forward() -> Iterator[None]:
    """While active, the default device is that of the user's code alone: not of ours, nor of what traces it."""
    count = len_function_stack()
    device = _default_device(count)
    if device is None:
        yield
        return
    with function_modes_aside():
        _push(_OfForward(device))
        try:
            yield
        finally:
            _pop()


@contextmanager
def function_modes_aside() -> Iterator[None]:
    """While active, no torch function mode is."""
    given = [_pop() for _ in range(len_function_stack())]
    try:
        yield
    finally:
        for mode in reversed(given):
            _push(mode)


class _OfForward(_DeviceContext):
    """A default device that looks who calls.

    It is torch's own kind, since ``with torch.device(...)`` inside forward takes the place of that.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _constructors() and kwargs.get("device") is None and _is_of_forward(sys._getframe(1)):
            kwargs["device"] = self.device
        return func(*args, **kwargs)


_PASSES_ON = frozenset({"_any", "_watched", "_called", "called", "_in_form", "call"})
"""Functions of a capture's function mode that call a function of forward's."""


def _is_of_forward(frame: FrameType | None) -> bool:
    """Whether a function is the user's, or one of torch's that eager runs, too; other modes stand in between."""
    while frame is not None and _passes_on(frame.f_code):
        frame = frame.f_back
    return frame is not None and not frame.f_code.co_filename.startswith(_NOT_OF_FORWARD)


def _passes_on(code: CodeType) -> bool:
    """Whether a function calls what another one has called, in the place of that."""
    if code.co_name == "__torch_function__":
        return True
    return code.co_name in _PASSES_ON and code.co_filename.startswith(_CAPTURE)


_TORCH = os.path.dirname(torch.__file__)
_PACKAGES = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
_CAPTURE = os.path.join(_PACKAGES, "bridge", "capture", "")
_TRACERS = (
    *("_decomp", "_dynamo", "_export", "_functorch", "_higher_order_ops", "_library", "_meta_registrations", "_ops"),
    *("_prims", "_refs", "_subclasses", "export", "fx"),
)
_NOT_OF_FORWARD = (
    *(os.path.join(_PACKAGES, package, "") for package in ("bridge", "autodiff", "partition")),
    *(os.path.join(_TORCH, part) for part in _TRACERS),
)
"""What works on forward and is none of it: this package, and what of torch only traces."""
