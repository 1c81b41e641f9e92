"""Conditions on number inputs: any number of the kind fits, where a constant must be the very same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bridge.capture import is_number
from bridge.guards import alike

__all__ = ["AnyNumber", "changed_number", "same_or_any_number"]


@dataclass(frozen=True)
class AnyNumber:
    """Stands among expected values where the compiled code takes the number as an input, or only counts it up.

    Attributes:
        kind: ``int`` or ``float``.
        counts: whether it is a counter, which may have any size.
    """

    kind: type
    counts: bool = False

    def __repr__(self) -> str:
        return f"any {self.kind.__name__}"


def same_or_any_number(now: Any, then: Any) -> bool:
    """Whether a value is the expected one, or a number where any is."""
    if type(then) is not AnyNumber:
        return alike(now, then)
    return type(now) is int if then.counts else is_number(now, then.kind)


def changed_number(now: Any, then: Any) -> bool:
    """Whether a value differs from the expected one as two numbers of one kind do."""
    return is_number(now, type(then)) and is_number(then, type(now))
