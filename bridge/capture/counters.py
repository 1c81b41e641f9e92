"""Counters: integers on the module that each call of forward counts up by a constant, ``self.calls += 1``.

A compiled call runs no Python; it adds the constant afterwards. That is the same function of the old value if forward
does nothing else with it: so in the run on fake tensors a stand-in that can only be added to takes each counter's place
(:mod:`bridge.capture.steady_call`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bridge.base.checkpoint_frames import checkpoint_frame
from bridge.capture.numbers import NotArithmeticError, refusing_all_use

__all__ = ["Counted", "Counter"]


@dataclass(frozen=True)
class Counter:
    """An attribute that each call counts up.

    Attributes:
        path, name: its module, as a dotted path, and its name.
        step: what a call adds; may be negative.
    """

    path: str
    name: str
    step: int


@refusing_all_use
class Counted:
    """Stands for a counter: its old value, which nothing knows, and what was added to it; any other use raises."""

    __slots__ = ("place", "step")

    def __init__(self, step: int, place: int):
        self.step = step
        self.place = place

    @property
    def __class__(self) -> type:
        return int

    def __add__(self, other: Any) -> Counted:
        if type(other) is not int:
            raise NotArithmeticError("a counter to which something else than a constant is added")
        if checkpoint_frame() is not None:
            raise NotArithmeticError("a counter that eager's backward counts up again")
        return Counted(self.step + other, self.place)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Counted:
        return self + -other if type(other) is int else NotImplemented
