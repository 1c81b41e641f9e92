"""Instances: a program with symbolic extents + sizes → instructions, layout and constants of those sizes.

All that varies is written down once as a table of distinct numbers, evaluated by one function, and every part of the
program picks its own from there. The arena keeps the order of the sample's plan: what lies below what.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

import torch

from autodiff.extents import Dim, Extent, ExtentScope
from bridge.base.devices import HOST
from bridge.compile.loop_ir.graph import Positions
from bridge.compile.runtime.instructions import CallLibrary, Launch, MakeView
from bridge.compile.runtime.layout import ALIGNMENT, Register, RegisterLayout
from bridge.compile.runtime.loop_frame import Instruction, RunLoop

__all__ = ["Instances"]

Table = Sequence[int]
"""Every distinct number of a program, for some sizes."""

Pick = Callable[[Table], Any]


class Instances:
    """What parts of a program are for given sizes.

    Args:
        scope: of all its extents.
        steps, layout, positions: see :class:`~bridge.compile.runtime.program.Program`.
    """

    def __init__(
        self,
        scope: ExtentScope,
        steps: Sequence[Instruction],
        layout: RegisterLayout,
        positions: Sequence[tuple[int, Positions]],
    ) -> None:
        self._known: dict[object, int] = {}
        self._numbers: list[Dim] = []
        self._layout = layout
        self._steps = [self._step(step) for step in steps]
        self._params, self._arena, self._fresh = (
            [self._register(register) for register in part] for part in (layout.params, layout.arena, layout.fresh)
        )
        self._bytes = self._pick(tuple(register.nbytes for register in layout.arena))
        self._views = [self._step(view) for view in layout.views]
        self._positions = [
            (slot, getattr(torch, each.dtype), self._nested((each.start, each.stop, each.step)))
            for slot, each in positions
        ]
        self._table = scope.compiled(self._numbers)

    def __call__(
        self, sizes: Mapping[str, int]
    ) -> tuple[tuple[Instruction, ...], RegisterLayout, tuple[tuple[int, torch.Tensor], ...]]:
        """Instructions, layout, constants that follow from the sizes."""
        table = self._table(sizes)
        offsets, total = self._placed(self._bytes(table))
        layout = self._layout
        static = RegisterLayout(
            layout.size,
            tuple([make(table, 0) for make in self._params]),
            tuple([make(table, offset) for make, offset in zip(self._arena, offsets, strict=True)]),
            total,
            tuple([make(table, 0) for make in self._fresh]),
            tuple([make(table) for make in self._views]),
            layout.results,
            layout.memory,
        )
        constants = tuple(
            [(slot, torch.arange(*pick(table), dtype=dtype, device=HOST)) for slot, dtype, pick in self._positions]
        )
        return tuple([make(table) for make in self._steps]), static, constants

    def _placed(self, sizes: Sequence[int]) -> tuple[list[int], int]:
        """Offsets in the arena, each behind what the sample's plan has below it; bytes of the whole."""
        offsets: list[int] = []
        ends: list[int] = []
        for size, below in zip(sizes, self._layout.below, strict=True):
            offset = max([ends[index] for index in below], default=0)
            offsets.append(offset)
            ends.append(offset + -(-size // ALIGNMENT) * ALIGNMENT)
        return offsets, max(ends, default=0)

    def _place(self, number: Dim) -> int:
        """The number's place in the table."""
        key = number.terms if isinstance(number, Extent) else number
        if key not in self._known:
            self._known[key] = len(self._numbers)
            self._numbers.append(number)
        return self._known[key]

    def _pick(self, numbers: tuple[Dim, ...]) -> Pick:
        """What gives a tuple's numbers from the table."""
        if not any(isinstance(number, Extent) for number in numbers):
            return lambda _: numbers
        places = [self._place(number) for number in numbers]
        if len(places) == 1:
            (place,) = places
            return lambda table: (table[place],)
        return itemgetter(*places)

    def _nested(self, value: Any) -> Pick:
        """The same for attributes: tuples in tuples, and what is no number."""
        if isinstance(value, Extent):
            place = self._place(value)
            return lambda table: table[place]
        if type(value) is not tuple:
            return lambda _: value
        parts = [self._nested(part) for part in value]
        return lambda table: tuple([part(table) for part in parts])

    def _step(self, step: Instruction) -> Callable[[Table], Instruction]:
        if _is_static(step):
            return lambda _: step
        match step:
            case Launch():
                scalars, offsets = self._pick(step.scalars), self._pick(step.offsets or ())
                fixed = (step.name, step.inputs, step.outputs, step.ops, step.reads, step.writes)
                at, contents = step.offsets is not None, step.contents
                return lambda table: Launch(*fixed, scalars(table), offsets(table) if at else None, contents, step.once)
            case CallLibrary():
                attrs = self._nested(step.attrs)
                called = (step.name, step.inputs, step.outputs, step.reads, step.writes)
                return lambda table: CallLibrary(*called, attrs(table), step.allocates, step.contents)
            case MakeView():
                shape, strides, offset = self._pick(step.shape), self._pick(step.strides), self._nested(step.offset)
                viewed = (step.name, step.inputs, step.outputs, step.reads, step.writes)
                return lambda table: MakeView(*viewed, shape(table), strides(table), offset(table))
            case RunLoop():
                length = self._nested(step.length)
                return lambda table: replace(step, length=length(table))

    def _register(self, register: Register) -> Callable[[Table, int], Register]:
        if not any(isinstance(extent, Extent) for extent in register.shape):
            return lambda _, offset: register if offset == register.offset else replace(register, offset=offset)
        shape = self._pick(register.shape)
        slot, name, dtype = register.slot, register.name, register.dtype
        return lambda table, offset: Register(slot, name, shape(table), dtype, offset)


def _is_static(step: Instruction) -> bool:
    """Whether an instruction is the same for all sizes."""
    match step:
        case Launch():
            numbers: tuple = (*step.scalars, *(step.offsets or ()))
        case CallLibrary():
            numbers = step.attrs
        case RunLoop():  # whose body is of one size
            numbers = (step.length,)
        case MakeView():
            numbers = (*step.shape, *step.strides, step.offset)
    return not _holds_extents(numbers)


def _holds_extents(value: Any) -> bool:
    return any(map(_holds_extents, value)) if type(value) is tuple else isinstance(value, Extent)
