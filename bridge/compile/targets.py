"""Targets: the user's ``target`` argument → a backend."""

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
"""Kind of a TVM target → the maker of its backend."""
_KINDS = "a TVM target of kind 'llvm' or 'cuda', or a GPU by name ('cuda', 'cuda:1')"


def backend_for(target: Target | str | dict[str, Any] | torch.device | Backend | None) -> Backend:
    """The backend of a TVM target (object, name or dict) or of a device; ``None``: this machine's CPU.

    ``"cuda"`` is torch's current GPU and ``"cuda:1"`` the second one; a TVM target of kind ``cuda`` is the first GPU,
    with the architecture that the target names.

    ``ValueError``: not a target, or a target without a backend.
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
        raise ValueError(f"target: wanted {_KINDS}, got {target!r}, none of TVM's: {error}") from None
    backend = _BACKENDS.get(target.kind.name)
    if backend is None:
        raise ValueError(f"target: wanted {_KINDS}, got one of kind {target.kind.name!r}")
    return backend(target)


def backend_on(device: torch.device) -> Backend:
    """The backend of a device. ``ValueError``: no backend for its type, no device of its index, or no NVRTC."""
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
    """The torch device that ``target`` names, or ``None``."""
    if isinstance(target, torch.device):
        return target
    if isinstance(target, str) and target.partition(":")[0] == "cuda":
        try:
            return torch.device(target)
        except RuntimeError as error:
            raise ValueError(f"target: {error}") from error
    return None
