"""Evaluator: data that holds symbolic extents → what gives the same data with numbers, for given sizes.

All that varies is written down once as a table of distinct numbers, evaluated by one function, and every part of the
data picks its own from there.

Instances: a program with symbolic extents + sizes → instructions, layout and constants of those sizes. The arena keeps
the order of the sample's plan: what lies below what.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from operator import itemgetter
from typing import Any

import torch

from autodiff.extents import Extent, ExtentScope
from bridge.base.devices import HOST
from bridge.compile.loop_ir.graph import Positions
from bridge.compile.runtime.instructions import StepContents
from bridge.compile.runtime.layout import ALIGNMENT, RegisterLayout
from bridge.compile.runtime.loop_frame import Instruction

__all__ = ["Instances", "evaluator"]


def evaluator(value: Any, scope: ExtentScope) -> Callable[[Mapping[str, int]], Any]:
    """What gives a value of lists, tuples and dataclasses for sizes of the scope's symbols: every extent in it is a
    number then; what holds none is the very object."""
    places: dict[tuple, int] = {}
    extents: list[Extent] = []
    make = _maker(value, places, extents) or (lambda _: value)
    numbers = scope.compiled(extents)
    return lambda sizes: make(numbers(sizes))


def _maker(value: Any, places: dict[tuple, int], extents: list[Extent]) -> Callable[[Sequence[int]], Any] | None:
    """What makes the value of a table of numbers, those of extents that are collected; ``None`` if it holds none."""
    if isinstance(value, Extent):
        place = places.setdefault(value.terms, len(extents))
        if place == len(extents):
            extents.append(value)
        return itemgetter(place)
    is_data = is_dataclass(value) and not isinstance(value, type | StepContents)  # those are of the sample
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
        self._layout = layout
        nbytes = [register.nbytes for register in layout.arena]
        parts = (steps, layout.params, layout.arena, nbytes, layout.fresh, layout.views, positions)
        self._parts = evaluator(parts, scope)

    def __call__(
        self, sizes: Mapping[str, int]
    ) -> tuple[tuple[Instruction, ...], RegisterLayout, tuple[tuple[int, torch.Tensor], ...]]:
        """Instructions, layout, constants that follow from the sizes."""
        steps, params, arena, nbytes, fresh, views, positions = self._parts(sizes)
        offsets, total = self._placed(nbytes)
        placed = zip(arena, offsets, strict=True)
        arena = tuple([each if each.offset == at else replace(each, offset=at) for each, at in placed])
        layout = RegisterLayout(
            self._layout.size, params, arena, total, fresh, views, self._layout.results, self._layout.memory
        )
        constants = tuple(
            [
                (slot, torch.arange(each.start, each.stop, each.step, dtype=getattr(torch, each.dtype), device=HOST))
                for slot, each in positions
            ]
        )
        return steps, layout, constants

    def _placed(self, sizes: Sequence[int]) -> tuple[list[int], int]:
        """Offsets in the arena, each behind what the sample's plan has below it; bytes of the whole."""
        offsets: list[int] = []
        ends: list[int] = []
        for size, below in zip(sizes, self._layout.below, strict=True):
            offset = max([ends[index] for index in below], default=0)
            offsets.append(offset)
            ends.append(offset + -(-size // ALIGNMENT) * ALIGNMENT)
        return offsets, max(ends, default=0)
