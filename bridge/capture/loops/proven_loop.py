"""A proven loop: its place among the rows of a record, and the role of each value that a step reads, in all steps:

* *local*: a result of one row of the same step,
* a *carry*: a result of one row of the previous step, or of an earlier step; in the first steps, values from before the
  loop,
* a *constant*: one value from before the loop, or
* a *part* of one value: each step reads equally much further (or before) along one axis, or an earlier loop's result
  equally many steps later; the step itself takes the part, or it was taken before. Parts may overlap or leave gaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

FURTHEST = 4
"""The number of steps that a carry may look back."""


class Producer(NamedTuple):
    """Definition of a value: result ``leaf`` of a row; a negative row is an input."""

    row: int
    leaf: int


class Local(NamedTuple):
    """The ``leaf``-th result of row ``row`` of the same step."""

    row: int
    leaf: int = 0


class Carry(NamedTuple):
    """Loop-carried value: result ``leaf`` of row ``row`` in the previous step; ``first`` in the first step.

    ``of``: for a value of an earlier step, the carry that it was in the previous step.
    """

    row: int
    leaf: int
    first: Any
    of: Carry | None = None


class Constant(NamedTuple):
    """A value from before the loop, the same for all steps."""

    value: Any


class Part(NamedTuple):
    """``extent`` slices of a value from ``begin`` on, along ``dim``; ``squeezed``: whether the axis is dropped."""

    of: Any
    dim: int
    begin: int
    extent: int
    squeezed: bool


class StepParts(NamedTuple):
    """Slices that advance with the steps: the first begin, and the increment per step along the axis (may be negative).

    ``of``: the sliced value, or all steps of an earlier loop's row: ``(loop, row, leaf)``.
    """

    of: Any
    dim: int
    first: int
    step: int
    extent: int
    squeezed: bool

    @property
    def falls(self) -> bool:
        """Whether later parts lie before earlier ones."""
        return self.step < 0


Role = Local | Carry | Constant | StepParts
"""The origin of an operand, the same in all steps."""


def step_parts(parts: Sequence[Part]) -> StepParts | None:
    """Parts at equal distances, as one object; ``None`` for other parts."""
    first, second = parts[:2]
    step = second.begin - first.begin
    if not step or any(part != first._replace(begin=first.begin + step * index) for index, part in enumerate(parts)):
        return None
    return StepParts(first.of, first.dim, first.begin, step, first.extent, first.squeezed)


@dataclass
class ProvenLoop:
    """A loop: ``steps`` times ``period`` rows from ``start`` on.

    Attributes:
        roles: by row of a step, the roles of its operands, in order; ``None`` for a row that takes a part.
        taken: by row of a step, the parts that it takes.
        written: by row of a step, the parts of a tensor that it writes, one per step. Its role is the part's new value.
        numbers: by row of a step whose number differs between steps, the numbers of all steps.
    """

    start: int
    period: int
    steps: int
    roles: list[list[Role] | None] = field(default_factory=list)
    taken: dict[int, StepParts] = field(default_factory=dict)
    written: dict[int, StepParts] = field(default_factory=dict)
    numbers: dict[int, tuple[int | float, ...]] = field(default_factory=dict)

    @property
    def stop(self) -> int:
        """The row after the last one."""
        return self.start + self.period * self.steps

    def group(self, index: int) -> range:
        """One row of a step, in all steps."""
        return range(self.start + index, self.stop, self.period)

    @property
    def carries(self) -> list[Carry]:
        """The carries, in order of first use, each followed by its ``of`` chain; no duplicates."""
        found: dict[Carry, None] = {}
        for each in self.of_kind(Carry):
            carry: Carry | None = each
            while carry is not None:
                found.setdefault(carry)
                carry = carry.of
        return list(found)

    @property
    def carried(self) -> set[Producer]:
        """The results of a step that are carries of the next one, and tensors that its rows write."""
        found = {Producer(carry.row, carry.leaf) for carry in self.carries if carry.of is None}
        return found | {Producer(row, 0) for row in self.written}

    @property
    def given(self) -> list[Any]:
        """Values from before the loop, including tensors that rows write."""
        values = [carry.first for carry in self.carries] + [role.value for role in self.of_kind(Constant)]
        values += [parts.of for parts in self.parts if not isinstance(parts.of, tuple)]
        return values + [parts.of for parts in self.written.values()]

    @property
    def parts(self) -> list[StepParts]:
        """The step parts, each once."""
        return list(dict.fromkeys([*self.taken.values(), *self.of_kind(StepParts)]))

    def of_kind(self, kind: type) -> list[Any]:
        """The roles of a kind, each once, in order of first use."""
        return list(dict.fromkeys(role for roles in self.roles for role in roles or () if isinstance(role, kind)))
