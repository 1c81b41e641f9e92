"""Python kernels: a fake mode → the mode in which operators on symbolic sizes run as they do while they are exported.

torch.export has operators take torch's Python kernels, which keep sizes symbolic. Without that, some take a kernel of
C++ (``constant_pad_nd``) that reads sizes as numbers, and so fixes them to the sample's. Only what autograd has handed
on is told to: above it, Python kernels take operators apart that eager draws for as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bridge.base.torch_internals import FakeTensorMode, TorchDispatchMode, python_kernels

__all__ = ["running"]


class _BelowAutograd(TorchDispatchMode):
    """Innermost but for the fake mode."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        with python_kernels():
            return func(*args, **(kwargs or {}))


@contextmanager
def running(mode: FakeTensorMode) -> Iterator[None]:
    """While active, operators run in ``mode``, symbolic sizes as in an export."""
    with mode:
        if mode.shape_env is None:
            yield
            return
        with _BelowAutograd():
            yield
