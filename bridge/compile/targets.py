"""Targets: what a user names as ``target`` → a backend."""

from __future__ import annotations

from typing import Any

from tvm.target import Target

from bridge.compile.backend import Backend
from bridge.compile.cpu.backend import CpuBackend, host_backend

__all__ = ["backend_for"]

_BACKENDS = {"llvm": CpuBackend}
"""By the kind of TVM's target."""


def backend_for(target: Target | str | dict[str, Any] | Backend | None) -> Backend:
    """The backend of a TVM target (also as its name or as a dict); of this machine's processor if ``None``.

    ``ValueError`` for what is no target, or one that there is no backend for.
    """
    if target is None:
        return host_backend()
    if isinstance(target, Backend):
        return target
    target = Target(target)
    backend = _BACKENDS.get(target.kind.name)
    if backend is None:
        raise ValueError(f"target: wanted one of kind {', '.join(map(repr, _BACKENDS))}, got {str(target)!r}")
    return backend(target=target)
