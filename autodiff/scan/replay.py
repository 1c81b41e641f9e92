"""Replay of rows with loops: rows and proven loops -> the same computation, each loop made once instead of unrolled.

The inputs and results of a step become tensors with the steps in front. Parts of one tensor are cut out of it; a later
reader of one step's value gets a slice of all steps' results; a concatenation of adjacent steps' results reads them at
once. The caller decides how to make a row, a loop and a movement of a tensor: as bindings of a Relax function
(:mod:`autodiff.scan.roll`), or as rows of a record (``bridge.capture.loops.rolled``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from autodiff.scan.prove import Producer, ProvenLoop, Rows, StepParts

__all__ = ["LoopReplay", "Movements", "ReplayedLoop"]


class Movements:
    """Movements of tensors, implemented by the caller."""

    def shape(self, value: Any) -> Sequence[int]:
        """The shape of a tensor."""
        raise NotImplementedError

    def slice(self, value: Any, dim: int, begin: int, end: int, step: int = 1) -> Any:
        """The slices ``begin``, ``begin + step``, … below ``end`` along ``dim``."""
        raise NotImplementedError

    def permute(self, value: Any, axes: list[int]) -> Any:
        """A permutation of the axes."""
        raise NotImplementedError

    def flip(self, value: Any) -> Any:
        """The first axis, reversed."""
        raise NotImplementedError

    def windows(self, value: Any, parts: StepParts, steps: int) -> Any:
        """All steps' parts, at equal distances along ``parts.dim``, with the steps in front."""
        raise NotImplementedError

    def narrowed(self, value: Any, dim: int, begin: int, extent: int) -> Any:
        """``extent`` adjacent slices from ``begin`` on; the tensor itself if these are all slices."""
        return value if extent == self.shape(value)[dim] else self.slice(value, dim, begin, begin + extent)

    def in_order(self, value: Any, axes: list[int]) -> Any:
        """:meth:`permute`; the tensor itself for the identity."""
        return value if axes == sorted(axes) else self.permute(value, axes)

    def to_dim(self, steps: Any, dim: int) -> Any:
        """Moves the first axis to ``dim``."""
        return self.in_order(steps, [*range(1, dim + 1), 0, *range(dim + 1, len(self.shape(steps)))])

    def to_front(self, value: Any, dim: int) -> Any:
        """Moves the axis ``dim`` to the front."""
        return self.in_order(value, [dim, *(each for each in range(len(self.shape(value))) if each != dim)])


@dataclass
class ReplayedLoop:
    """A loop that was made: its last carries, and its results of all steps.

    Attributes:
        steps, reverse: number of steps, and whether tensors of all steps begin with the last step.
    """

    steps: int
    reverse: bool
    last: dict[Producer, Any] = field(default_factory=dict)
    whole: dict[Producer, Any] = field(default_factory=dict)

    def position(self, step: int) -> int:
        """The index of a step in tensors of all steps."""
        return self.steps - 1 - step if self.reverse else step


class LoopReplay:
    """Makes rows one by one and loops as a whole; maps old values to new ones."""

    def __init__(self, rows: Rows, loops: Sequence[ProvenLoop], movements: Movements):
        self.rows, self.loops, self.movements = rows, loops, movements
        self.made: dict[Any, Any] = {}
        self.replayed: list[ReplayedLoop] = []
        self.loop_of = {row: number for number, loop in enumerate(loops) for row in range(loop.start, loop.stop)}
        self._others = [row for row in range(len(rows.kinds)) if row not in self.loop_of]

    def row(self, row: int) -> None:
        """Makes a row outside of loops."""
        raise NotImplementedError

    def loop(self, number: int, loop: ProvenLoop, known: ReplayedLoop) -> None:
        """Makes a loop, and records its last carries and the results that are read after it."""
        raise NotImplementedError

    def outside(self, value: Any) -> Any:
        """The new value of an input, or of a part that a loop takes."""
        raise NotImplementedError

    def of_step(self, whole: Any, position: int, value: Any) -> Any:
        """The new value of one step's result: a slice of all steps' results."""
        raise NotImplementedError

    def run(self) -> None:
        """Makes all rows and loops, in order."""
        begins = {loop.start: number for number, loop in enumerate(self.loops)}
        for row in sorted([*self._others, *begins]):
            if row not in begins:
                self.row(row)
                continue
            loop = self.loops[begins[row]]
            known = ReplayedLoop(loop.steps, bool(loop.parts) and all(map(self._falls, loop.parts)))
            self.loop(begins[row], loop, known)
            self.replayed.append(known)

    def value(self, value: Any) -> Any:
        """The new value of an old one; a step's result is sliced at its first use."""
        if value not in self.made:
            place = self.place(value)
            if place is None or place[2].row in self.loops[place[0]].taken:
                self.made[value] = self.outside(value)
            elif self._is_last(place):
                self.made[value] = self.replayed[place[0]].last[place[2]]
            else:
                known = self.replayed[place[0]]
                self.made[value] = self.of_step(known.whole[place[2]], known.position(place[1]), value)
        return self.made[value]

    def place(self, value: Any) -> tuple[int, int, Producer] | None:
        """The origin of a value in a loop: the loop's number, the step, the result of a step; else ``None``."""
        row, leaf = self.rows.made[value]
        number = self.loop_of.get(row)
        if number is None:
            return None
        step, index = divmod(row - self.loops[number].start, self.loops[number].period)
        return number, step, Producer(index, leaf)

    def _is_last(self, place: tuple[int, int, Producer]) -> bool:
        """Whether a value is a carry's value after the last step."""
        loop = self.loops[place[0]]
        return place[1] == loop.steps - 1 and place[2] in loop.carried

    def leaving(self, number: int) -> list[Producer]:
        """The results of a step that are read after the loop, for any step."""
        found: dict[Producer, None] = {}
        values = [value for row in self._others for value in self.rows.reads[row]]
        for other, loop in enumerate(self.loops):
            of_loops = [parts.of for parts in loop.parts if isinstance(parts.of, tuple)]
            found.update((Producer(row, leaf), None) for of, row, leaf in of_loops if of == number)
            values += loop.given if other != number else ()
        for place in map(self.place, (*values, *self.rows.needed)):
            if place is None or place[0] != number or place[2].row in self.loops[number].taken:
                continue
            if not self._is_last(place):
                found.setdefault(place[2])
        return list(found)

    def adjacent(self, values: Sequence[Any]) -> list[list[Any]]:
        """Consecutive values grouped by adjacent steps, ascending or descending, of one result."""
        groups: list[list[Any]] = []
        places, steps = [self.place(value) for value in values], 0
        for value, (before, place) in zip(values, pairwise([None, *places]), strict=True):
            apart = place[1] - before[1] if None not in (place, before) and place[::2] == before[::2] else 0
            if abs(apart) == 1 and (len(groups[-1]) == 1 or apart == steps):
                groups[-1].append(value)
                steps = apart
            else:
                groups.append([value])
        return groups

    def of_steps(self, values: Sequence[Any]) -> Any:
        """Adjacent steps' values as one tensor with the steps in front, in the given order."""
        (number, first, producer), (_, last, _) = self.place(values[0]), self.place(values[-1])
        known = self.replayed[number]
        begin, end = known.position(first), known.position(last)
        whole = self.movements.narrowed(known.whole[producer], 0, min(begin, end), len(values))
        return self.movements.flip(whole) if end < begin else whole

    def _falls(self, parts: StepParts) -> bool:
        """Whether later steps read earlier positions of the tensor."""
        return parts.falls != (isinstance(parts.of, tuple) and self.replayed[parts.of[0]].reverse)

    def in_front(self, parts: StepParts, known: ReplayedLoop) -> Any:
        """A tensor with the parts of all steps in front, in the order of the loop's tensors."""
        of, dim, first, step, extent, _ = parts
        steps, end, apart = known.steps, first + step * (known.steps - 1), abs(step)
        if isinstance(of, tuple):
            loop = self.replayed[of[0]]
            begin, whole = min(loop.position(first), loop.position(end)), loop.whole[Producer(*of[1:])]
            if apart == 1:
                whole = self.movements.narrowed(whole, 0, begin, steps)
            else:
                whole = self.movements.slice(whole, 0, begin, begin + apart * (steps - 1) + 1, apart)
        else:
            whole = self.movements.narrowed(self.value(of), dim, min(first, end), apart * (steps - 1) + extent)
            whole = self.movements.windows(whole, parts, steps)
        return self.movements.flip(whole) if self._falls(parts) != known.reverse else whole
