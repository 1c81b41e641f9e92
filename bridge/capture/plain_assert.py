"""Plain assert: ``torch._assert(condition, message)`` as Python's own statement → the condition is read as a number.

torch.export takes ``torch._assert`` out of forward's hands since 2.15; then forward reads no number there, and the
check would be lost.
"""

from __future__ import annotations

from typing import Any

__all__ = ["plain_assert"]


def plain_assert(condition: Any, message: str) -> None:
    """Raises ``AssertionError(message)`` unless ``condition``."""
    if not condition:
        raise AssertionError(message)
