"""Devices: the devices of a call's tensors → the device that the call is captured, lowered and compiled for.

Constants are computed on the host. A thread that captures or lowers a call works for the device of the call's tensors
(:func:`working_for`), and uses that device's autocast.

Default device (``torch.set_default_device``, ``with torch.device(...)``): one comparable value, limited to forward.

torch's function mode gives this device to every factory called without one, from any code. A capture runs forward with
the mode, and its own work (constants of the host, say) without it.
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

HOST = torch.device("cpu")

TYPES = ("cpu", "cuda")
"""Types of devices with a backend."""

_CURRENT = ContextVar("bridge_device", default=HOST)


def current_device() -> torch.device:
    """The device of the call that this thread captures or lowers; the host outside of a capture or lowering."""
    return _CURRENT.get()


@contextmanager
def working_for(device: torch.device) -> Iterator[None]:
    """While active, :func:`current_device` is the given one."""
    token = _CURRENT.set(device)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def devices_of(tensors: Iterable[torch.Tensor]) -> list[torch.device]:
    """The devices of tensors, in order, each once."""
    return list(dict.fromkeys(tensor.device for tensor in tensors))


def may_be_on_host(tensor: torch.Tensor) -> bool:
    """Whether an argument may lie on the host beside a GPU's tensors: integers of one dimension or more."""
    is_number = tensor.is_floating_point() or tensor.is_complex()
    return not is_number and tensor.dim() > 0


_WORKED_FOR = "current"


def name_of(device: torch.device) -> str:
    """A device's name on disk: the GPU that this thread works for has the same name on every rank."""
    return _WORKED_FOR if device == current_device() != HOST else str(device)


def device_named(name: str) -> torch.device:
    """The device named by :func:`name_of`, for a thread that may work for another GPU."""
    return current_device() if name == _WORKED_FOR else torch.device(name)


_DeviceContext: type = find("torch.utils._device.DeviceContext")
_constructors: Callable[[], set] = find("torch.utils._device._device_constructors")
_stack_at: Callable[[int], Any] = find("torch._C._get_function_stack_at")
_pop: Callable[[], Any] = find("torch._C._pop_torch_function_stack")
_push: Callable[[Any], None] = find("torch._C._push_on_torch_function_stack")


def function_modes() -> int | torch.device:
    """0 for no effective torch function mode; the default device, if no other mode is active; else the number of modes.

    The host as the default device counts as none.
    """
    count = len_function_stack()
    if not count:
        return 0
    device = _default_device(count)
    if device is None:
        return count
    return 0 if device.type == HOST.type else device


def _default_device(count: int) -> torch.device | None:
    """The innermost default device, if all ``count`` modes are default devices; it overrides the outer ones."""
    modes = [_stack_at(place) for place in range(count)]
    if not modes or not all(isinstance(mode, _DeviceContext) for mode in modes):
        return None
    device = modes[-1].device
    if device.type == "cuda" and device.index is None:  # the current one, which fake tensors do not look up
        return torch.device("cuda", torch.cuda.current_device())
    return device


@contextmanager
def default_device_of_forward() -> Iterator[None]:
    """While active, the default device applies only to the user's code: not to this package or torch's tracers."""
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
    """A default device that applies only to calls from forward.

    A subclass of torch's own mode: ``with torch.device(...)`` inside forward replaces it.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _constructors() and kwargs.get("device") is None and _is_of_forward(sys._getframe(1)):
            kwargs["device"] = self.device
        return func(*args, **kwargs)


_PASSES_ON = frozenset({"_any", "_as_python", "_called", "_in_form", "_watched", "call", "called", "handle"})
"""Functions of a capture's function mode that call one of forward's functions."""


def _is_of_forward(frame: FrameType | None) -> bool:
    """Whether a frame is the user's, or one of torch's that eager runs as well; looks past other modes' frames."""
    while frame is not None and _passes_on(frame.f_code):
        frame = frame.f_back
    return frame is not None and not frame.f_code.co_filename.startswith(_NOT_OF_FORWARD)


def _passes_on(code: CodeType) -> bool:
    """Whether a function forwards an intercepted call."""
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
"""Folders of code that works on forward without being part of it: this package and torch's tracers."""
