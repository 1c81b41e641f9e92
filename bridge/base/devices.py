"""Devices: those of a call's tensors → the one that the call is captured, lowered and compiled for.

Constants are computed on the host. A thread that captures or lowers a call works for the device of the call's tensors
(:func:`working_for`): its autocast is the one that counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

__all__ = ["HOST", "TYPES", "current_device", "device_named", "devices_of", "may_be_on_host", "name_of", "working_for"]

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
