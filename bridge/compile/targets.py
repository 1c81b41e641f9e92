"""Targets: what a user names as ``target`` → a backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tvm.target import Target

from bridge.compile.backend import Backend
from bridge.compile.cpu.backend import CpuBackend, host_backend
from bridge.compile.cuda.backend import CudaBackend, architecture
from bridge.compile.cuda.nvrtc import absent

__all__ = ["backend_for", "backend_on"]

_BACKENDS: dict[str, Callable[[Target], Backend]] = {
    "llvm": lambda target: CpuBackend(target=target),
    "cuda": lambda target: CudaBackend(arch=str(target.attrs["arch"])),
}
"""By the kind of TVM's target."""


def backend_for(target: Target | str | dict[str, Any] | torch.device | Backend | None) -> Backend:
    """The backend of a TVM target (also as its name or as a dict), or of a device; of this machine's processor if
    ``None``.

    ``"cuda"`` is torch's current GPU and ``"cuda:1"`` the second one; a TVM target of kind ``cuda`` is the first one,
    for the architecture that the target names.

    ``ValueError`` for what is no target, or one that there is no backend for.
    """
    if target is None:
        return host_backend()
    if isinstance(target, Backend):
        return target
    device = _device(target)
    if device is not None:
        return backend_on(device)
    try:
        target = Target(target)
    except ValueError as error:
        raise ValueError(f"target: {target!r} is none of TVM's: {error}") from None
    backend = _BACKENDS.get(target.kind.name)
    if backend is None:
        raise ValueError(f"target: wanted one of kind {', '.join(map(repr, _BACKENDS))}, got {str(target)!r}")
    return backend(target)


def backend_on(device: torch.device) -> Backend:
    """The backend that compiles for a device. ``ValueError`` if there is none, no such device, or no NVRTC."""
    if device.type != "cuda":
        if device.type == host_backend().device.type:
            return host_backend()
        raise ValueError(f"target: there is no backend for {device}")
    count = torch.cuda.device_count()
    index = device.index if device.index is not None else torch.cuda.current_device() if count else 0
    if index >= count:
        raise ValueError(
            f"target: {str(device)!r} is no GPU of this machine, torch finds {count}; kernels for one that is elsewhere"
            ' are compiled for {"kind": "cuda", "arch": "sm_90"}'
        )
    if absent():
        raise ValueError(f"target: kernels for {device} cannot be compiled: {absent()}")
    return CudaBackend(index=index, arch=architecture(index))


def _device(target: Any) -> torch.device | None:
    """The GPU that a target names."""
    if isinstance(target, torch.device):
        return target
    if isinstance(target, str) and target.partition(":")[0] == "cuda":
        try:
            return torch.device(target)
        except RuntimeError as error:
            raise ValueError(f"target: {error}") from error
    return None
