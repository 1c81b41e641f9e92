"""Roles of operands in a loop: what all steps read at one place -> what that is in each step.

Rows are numbered; each makes values. What rows are, bindings or recorded calls, is the caller's:
:mod:`autodiff.scan.prove` and ``bridge.capture.loops.find`` ask for the roles of theirs, and add what each knows of
values from before the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from autodiff.scan.period import PeriodicRun

__all__ = ["FURTHEST", "Carry", "Constant", "Local", "ProvenLoop", "made_inside", "shifts"]

FURTHEST = 4
"""Steps that a loop may look back."""


class Local(NamedTuple):
    """The ``leaf``-th result of row ``row`` of the same step."""

    row: int
    leaf: int = 0


class Carry(NamedTuple):
    """Such a result of the step before; in the first step the value ``first``. Of a step further back, it is what the
    carry ``of`` was in the step before."""

    row: int
    leaf: int
    first: Any
    of: Carry | None = None


class Constant(NamedTuple):
    """A value from before the loop, one for all steps."""

    value: Any


@dataclass
class ProvenLoop:
    """A loop: ``steps`` times ``period`` rows from ``start`` on.

    Attributes:
        roles: of each row of a step, those of what it reads, in order; ``None`` for one that takes a part.
        taken: what these take, by their place in the step.
    """

    start: int
    period: int
    steps: int
    roles: list[list[Any] | None] = field(default_factory=list)
    taken: dict[int, Any] = field(default_factory=dict)

    @property
    def stop(self) -> int:
        """The row after the last one."""
        return self.start + self.period * self.steps

    @property
    def carries(self) -> list[Carry]:
        """Each once, in order of first use, and those that they are carries of."""
        found: dict[Carry, None] = {}
        for each in self.of_kind(Carry):
            carry: Carry | None = each
            while carry is not None:
                found.setdefault(carry)
                carry = carry.of
        return list(found)

    def of_kind(self, kind: type) -> list:
        """The roles of a kind, each once, in order of first use."""
        return list(dict.fromkeys(role for roles in self.roles for role in roles or () if isinstance(role, kind)))


def made_inside(
    read: Sequence[Any], made: Callable[[Any], tuple[int, int]], start: int, period: int
) -> Local | Carry | None:
    """The role of values, one for each step, of which the last is made in the loop; ``None`` if it has none.

    Args:
        made: the row that makes a value, before ``start`` for one from before the loop, and which result it is.
    """
    back = next((step for step, value in enumerate(read) if made(value)[0] >= start), FURTHEST + 1)
    if back > FURTHEST:
        return None
    row, leaf = made(read[back])
    if row >= start + period or any(made(value) != (row + at * period, leaf) for at, value in enumerate(read[back:])):
        return None
    role: Carry | None = None
    for value in reversed(read[:back]):
        role = Carry(row - start, leaf, value, role)
    return role or Local(row - start, leaf)


def shifts(run: PeriodicRun, most: int) -> Iterator[int]:
    """By how many rows a loop may begin later than a run: anywhere in the first two steps, as far as there is room."""
    spare = min(run.length % run.period + 1, most)
    yield from (*range(spare), *range(run.period, run.period + spare))
