"""Eager with torch's control-flow operators written out, for second derivatives.

Eager's second derivatives through ``scan`` and ``while_loop`` lack terms, and through ``torch.cond`` there is none;
compiled code's are those of the control flow written out (``docs/limits.md``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.utils._python_dispatch import TorchDispatchMode

from bridge.capture import AsPython

__all__ = ["written_out"]


class _WithoutDynamo(TorchDispatchMode):
    """Runs operators as they are; Dynamo traces nothing under it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@contextmanager
def written_out() -> Iterator[None]:
    """While active, control-flow operators run as Python."""
    with _WithoutDynamo(), AsPython():
        yield
