"""Evaluator: data with symbolic extents → a function of the sizes that returns the same data with numbers.

All distinct extents form one table of numbers, which one function computes; every part of the data picks its own
numbers there. Parts without extents are shared by all sizes, and so are the fields of an object that have none.

Instances: a program with symbolic extents and sizes → instructions, layout and constants at these sizes. The arena
keeps the vertical order of the sample's plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from operator import itemgetter
from typing import Any

import torch

from autodiff.extents import Dim, Extent, ExtentScope
from bridge.base.devices import HOST
from bridge.base.torch_internals import VF
from bridge.compile.loop_ir.graph import Positions
from bridge.compile.runtime.instructions import StepContents
from bridge.compile.runtime.layout import ALIGNMENT, Register, RegisterLayout
from bridge.compile.runtime.loop_frame import Instruction

__all__ = ["Instances", "evaluator"]

_Maker = Callable[[Sequence[int]], Any]
"""The table of numbers → a value."""


def evaluator(value: Any, scope: ExtentScope) -> Callable[[Mapping[str, int]], Any]:
    """A function of the sizes of the scope's symbols that evaluates every extent in a value of lists, tuples and
    dataclasses. A part without extents stays the identical object."""
    table = _Table()
    make = table.maker(value)
    if make is None:
        return lambda sizes: value
    numbers = scope.compiled(table.values)
    return lambda sizes: make(numbers(sizes))


class _Table:
    """Distinct integers → places in a table; data → functions that make it of the table's numbers."""

    def __init__(self) -> None:
        self._places: dict[Any, int] = {}
        self.values: list[Dim] = []

    def place(self, value: Dim) -> int:
        """The place of an extent or a number."""
        found = self._places.setdefault(value.terms if isinstance(value, Extent) else value, len(self.values))
        if found == len(self.values):
            self.values.append(value)
        return found

    def maker(self, value: Any) -> _Maker | None:
        """A function that makes the value; ``None`` if it has no extents."""
        if isinstance(value, Extent):
            return itemgetter(self.place(value))
        if type(value) in (list, tuple):
            return self._sequence(value)
        if not is_dataclass(value) or isinstance(value, type | StepContents):  # contents describe the sample
            return None
        held = {field.name: getattr(value, field.name) for field in fields(value)}
        changed = [(name, make) for name, part in held.items() if (make := self.maker(part)) is not None]
        return _object(type(value), held, changed) if changed else None

    def _sequence(self, value: Sequence[Any]) -> _Maker | None:
        kind = type(value)
        if all(type(each) is int or isinstance(each, Extent) for each in value):
            if all(type(each) is int for each in value):
                return None
            pick = itemgetter(*map(self.place, value))
            if kind is tuple and len(value) > 1:
                return pick
            return (lambda numbers: kind((pick(numbers),))) if len(value) == 1 else lambda numbers: kind(pick(numbers))
        changed = [(place, make) for place, each in enumerate(value) if (make := self.maker(each)) is not None]

        def make(numbers: Sequence[int]) -> Any:
            made = list(value)
            for place, part in changed:
                made[place] = part(numbers)
            return made if kind is list else kind(made)

        return make if changed else None


def _object(kind: type, held: Mapping[str, Any], changed: Sequence[tuple[str, _Maker]]) -> _Maker:
    """A function that makes a dataclass's object; its ``__init__`` takes five times as long."""

    def make(numbers: Sequence[int]) -> Any:
        made = object.__new__(kind)
        attributes = made.__dict__
        attributes.update(held)
        for name, part in changed:
            attributes[name] = part(numbers)
        return made

    return make


class Instances:
    """Evaluates a program's parts at given sizes.

    Args:
        scope: of all extents.
        steps, layout, positions: see :class:`~bridge.compile.runtime.program.Program`.
    """

    def __init__(
        self,
        scope: ExtentScope,
        steps: Sequence[Instruction],
        layout: RegisterLayout,
        positions: Sequence[tuple[int, Positions]],
    ) -> None:
        self._layout = layout
        nbytes = [register.nbytes for register in layout.arena]
        parts = (steps, layout.params, layout.arena, nbytes, layout.fresh, layout.views, positions)
        self._parts = evaluator(parts, scope)

    def __call__(
        self, sizes: Mapping[str, int]
    ) -> tuple[tuple[Instruction, ...], RegisterLayout, tuple[tuple[int, torch.Tensor], ...]]:
        """Instructions, layout, and constants of dynamic size."""
        steps, params, arena, nbytes, fresh, views, positions = self._parts(sizes)
        offsets, total = self._placed(nbytes)
        placed = zip(arena, offsets, strict=True)
        arena = tuple([each if each.offset == at else _moved(each, at) for each, at in placed])
        layout = RegisterLayout(
            self._layout.size, params, arena, total, fresh, views, self._layout.results, self._layout.memory
        )
        constants = tuple(
            [
                (slot, VF.arange(each.start, each.stop, each.step, dtype=getattr(torch, each.dtype), device=HOST))
                for slot, each in positions
            ]
        )
        return steps, layout, constants

    def _placed(self, sizes: Sequence[int]) -> tuple[list[int], int]:
        """Offsets in the arena, each after the tensors below it in the sample's plan; total bytes."""
        offsets: list[int] = []
        ends: list[int] = []
        for size, below in zip(sizes, self._layout.below, strict=True):
            offset = max([ends[index] for index in below], default=0)
            offsets.append(offset)
            ends.append(offset + -(-size // ALIGNMENT) * ALIGNMENT)
        return offsets, max(ends, default=0)


def _moved(register: Register, offset: int) -> Register:
    """The register at another offset in the arena."""
    made = object.__new__(Register)
    made.__dict__.update(register.__dict__, offset=offset)
    return made
