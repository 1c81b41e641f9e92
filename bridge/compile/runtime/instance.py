"""Evaluator: data with symbolic extents → a function of the sizes that returns the same data with numbers.

All distinct extents form one table, evaluated by one function; every part of the data picks its own numbers there.

Instances: a program with symbolic extents and sizes → instructions, layout and constants at these sizes. The arena
keeps the vertical order of the sample's plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from operator import itemgetter
from typing import Any

import torch

from autodiff.extents import Extent, ExtentScope
from bridge.base.devices import HOST
from bridge.base.torch_internals import VF
from bridge.compile.loop_ir.graph import Positions
from bridge.compile.runtime.instructions import StepContents
from bridge.compile.runtime.layout import ALIGNMENT, RegisterLayout
from bridge.compile.runtime.loop_frame import Instruction

__all__ = ["Instances", "evaluator"]


def evaluator(value: Any, scope: ExtentScope) -> Callable[[Mapping[str, int]], Any]:
    """A function of the sizes of the scope's symbols that evaluates every extent in a value of lists, tuples and
    dataclasses. A part without extents stays the identical object."""
    places: dict[tuple, int] = {}
    extents: list[Extent] = []
    make = _maker(value, places, extents) or (lambda _: value)
    numbers = scope.compiled(extents)
    return lambda sizes: make(numbers(sizes))


def _maker(value: Any, places: dict[tuple, int], extents: list[Extent]) -> Callable[[Sequence[int]], Any] | None:
    """A function of the table of numbers that makes the value; collects its extents; ``None`` if it has none."""
    if isinstance(value, Extent):
        place = places.setdefault(value.terms, len(extents))
        if place == len(extents):
            extents.append(value)
        return itemgetter(place)
    is_data = is_dataclass(value) and not isinstance(value, type | StepContents)  # contents describe the sample
    if not is_data and type(value) not in (list, tuple):
        return None
    parts = [getattr(value, field.name) for field in fields(value)] if is_data else value
    makers = [_maker(part, places, extents) for part in parts]
    if not any(makers):
        return None
    kind, known = type(value), list(zip(makers, parts, strict=True))
    if is_data:
        return lambda numbers: kind(*[part if make is None else make(numbers) for make, part in known])
    return lambda numbers: kind([part if make is None else make(numbers) for make, part in known])


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
        arena = tuple([each if each.offset == at else replace(each, offset=at) for each, at in placed])
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
