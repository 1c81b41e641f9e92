"""Replay of rows with loops: rows and their loops -> what they compute, with each loop in the place of all its steps.

What a step is given and gives are tensors with the steps in front: parts that lie in one tensor are cut out of it, what
is read of a step afterwards is cut out of its results of all steps, and a concatenation of adjacent steps' results
reads these at once. How a row, a loop and a movement of a tensor are made is the caller's: as bindings of a Relax
function (:mod:`autodiff.scan.roll`), or as rows of a record (``bridge.capture.loops.rolled``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from autodiff.scan.prove import Producer, ProvenLoop, Rows, StepParts

__all__ = ["LoopReplay", "Movements", "ReplayedLoop"]


class Movements:
    """Movements of tensors, as a caller makes them."""

    def shape(self, value: Any) -> Sequence[int]:
        """Of a tensor."""
        raise NotImplementedError

    def slice(self, value: Any, dim: int, begin: int, end: int, step: int = 1) -> Any:
        """Every so many slices."""
        raise NotImplementedError

    def permute(self, value: Any, axes: list[int]) -> Any:
        """The axes in another order."""
        raise NotImplementedError

    def flip(self, value: Any) -> Any:
        """The first axis, backwards."""
        raise NotImplementedError

    def windows(self, value: Any, parts: StepParts, steps: int) -> Any:
        """Parts that lie one after the other along ``parts.dim``, with the steps in front."""
        raise NotImplementedError

    def narrowed(self, value: Any, dim: int, begin: int, extent: int) -> Any:
        """Adjacent slices; the tensor itself if these are all."""
        return value if extent == self.shape(value)[dim] else self.slice(value, dim, begin, begin + extent)

    def in_order(self, value: Any, axes: list[int]) -> Any:
        """As :meth:`permute`; the tensor itself if it changes nothing."""
        return value if axes == sorted(axes) else self.permute(value, axes)

    def to_dim(self, steps: Any, dim: int) -> Any:
        """A tensor whose first axis has become this one."""
        return self.in_order(steps, [*range(1, dim + 1), 0, *range(dim + 1, len(self.shape(steps)))])

    def to_front(self, value: Any, dim: int) -> Any:
        """A tensor whose axis has become the first one."""
        return self.in_order(value, [dim, *(each for each in range(len(self.shape(value))) if each != dim)])


@dataclass
class ReplayedLoop:
    """A loop that is made: its last carries, and its results of all steps.

    Attributes:
        steps, reverse: how many steps, and whether the last one lies first in tensors of all steps.
    """

    steps: int
    reverse: bool
    last: dict[Producer, Any] = field(default_factory=dict)
    whole: dict[Producer, Any] = field(default_factory=dict)

    def position(self, step: int) -> int:
        """Where a step lies in its tensors."""
        return self.steps - 1 - step if self.reverse else step


class LoopReplay:
    """What rows with loops compute, made row by row and loop by loop."""

    def __init__(self, rows: Rows, loops: Sequence[ProvenLoop], movements: Movements):
        self.rows, self.loops, self.movements = rows, loops, movements
        self.made: dict[Any, Any] = {}
        self.replayed: list[ReplayedLoop] = []
        self.loop_of = {row: number for number, loop in enumerate(loops) for row in range(loop.start, loop.stop)}
        self._others = [row for row in range(len(rows.kinds)) if row not in self.loop_of]

    def row(self, row: int) -> None:
        """Makes a row that is in no loop."""
        raise NotImplementedError

    def loop(self, number: int, loop: ProvenLoop, known: ReplayedLoop) -> None:
        """Makes a loop, and notes its last carries and the results that leave it."""
        raise NotImplementedError

    def outside(self, value: Any) -> Any:
        """What stands for a value that no loop makes and that is not made yet, or for a part that a loop takes."""
        raise NotImplementedError

    def of_step(self, whole: Any, position: int, value: Any) -> Any:
        """What stands for a value of a step: a part of the results of all steps."""
        raise NotImplementedError

    def run(self) -> None:
        """Makes all rows."""
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
        """What stands for a value; one of a step is cut out where it is first read."""
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
        """The loop that makes a value: its number, the step, and which result of the step it is."""
        row, leaf = self.rows.made[value]
        number = self.loop_of.get(row)
        if number is None:
            return None
        step, index = divmod(row - self.loops[number].start, self.loops[number].period)
        return number, step, Producer(index, leaf)

    def _is_last(self, place: tuple[int, int, Producer]) -> bool:
        """Whether a value of a loop is what a carry is after the last step."""
        loop = self.loops[place[0]]
        return place[1] == loop.steps - 1 and place[2] in loop.carried

    def leaving(self, number: int) -> list[Producer]:
        """The results of a step whose values, of some step, are read after the loop."""
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
        """Values in a line in groups, of which each one's step is the one after (or before) that of the one before."""
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
        """Values of adjacent steps as one tensor with the steps in front, in the order that they have."""
        (number, first, producer), (_, last, _) = self.place(values[0]), self.place(values[-1])
        known = self.replayed[number]
        begin, end = known.position(first), known.position(last)
        whole = self.movements.narrowed(known.whole[producer], 0, min(begin, end), len(values))
        return self.movements.flip(whole) if end < begin else whole

    def _falls(self, parts: StepParts) -> bool:
        """Whether later parts lie before earlier ones."""
        return parts.falls != (isinstance(parts.of, tuple) and self.replayed[parts.of[0]].reverse)

    def in_front(self, parts: StepParts, known: ReplayedLoop) -> Any:
        """A tensor with the parts of all steps in front, as the loop's tensors lie."""
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
