"""Folded recordings: recorded calls with their loops -> plain data in which each loop is one step, whatever its length.

Two recordings of one forward, on arguments that differ in one size, are the same forward of that size if their folded
forms are equal but for integers, each of which is the same multiple of the size plus the same number in both
(:func:`of_any_length`). A further recording is proven to be that forward by :meth:`OfAnyLength.holds`: its folded form
is this one at its size, so that it makes the same calls in the same order, as often as this one says.

Tensors are told by where they come from:

    ("input", number)                                       an argument, or a tensor of the module
    ("made", call, leaf)                                    by a call outside of the loops
    ("part", tensor, dim, begin, extent, squeezed)          a part of one
    ("last", loop, row, leaf)                               by the last step of a loop
    ("step", loop, row, leaf, step)                         by another step
    ("steps", loop, row, leaf, begin, end)                  by these steps, as one tensor with the steps in front
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from bridge.capture.loops.arguments import key_of
from bridge.capture.loops.calls import Value
from bridge.capture.loops.find import Carry, Constant, Local, Loop, Parts
from bridge.capture.loops.recorder import NotRecordedError
from bridge.capture.loops.replay import Replay, sources_of

__all__ = ["FoldedCall", "FoldedJoin", "FoldedLoop", "OfAnyLength", "Varying", "folded", "of_any_length"]

Source = tuple
"""Where a tensor comes from, see above."""


class FoldedCall(NamedTuple):
    """``func(*args, **kwargs)`` on tensors, from outside of the loops or of a step, where ``reads`` are roles.

    Attributes:
        part: of what it takes, if it takes a part: dim, begin, extent and whether squeezed.
        number: the number in the arguments.
        forms: of its results.
    """

    func: Any
    args: tuple
    kwargs: dict[str, Any]
    reads: tuple
    part: tuple | None
    number: int | float | None
    forms: tuple


class FoldedJoin(NamedTuple):
    """``stack`` or ``cat`` along ``dim`` of pieces, each of them adjacent steps of a loop, or one tensor."""

    stacks: bool
    dim: int
    pieces: tuple[Source, ...]
    forms: tuple


class FoldedLoop(NamedTuple):
    """A loop.

    Attributes:
        steps: how many.
        carries: of each, row and leaf, where the first one comes from, and the carry that it was in the step before.
        parts: dim, first, step, extent and squeezed of each, and where the whole comes from.
        rows: of a step: a call, the number of the part that it takes, or ``None`` where it is dead.
        reached: what autograd reaches from each carry: ``("carry", n)``, ``("part", n)`` or a source.
        ys: row and leaf of the results of all steps.
    """

    steps: int
    carries: tuple
    parts: tuple
    rows: tuple
    reached: tuple
    ys: tuple


@dataclass(frozen=True)
class Varying:
    """An integer that is ``factor * size + offset``."""

    factor: int
    offset: int


@dataclass(frozen=True)
class OfAnyLength:
    """A folded form in which integers may be :class:`Varying`."""

    form: Any

    def at(self, size: Any) -> Any:
        """The folded form of a size, a number or torch's symbol."""
        return _mapped(self.form, lambda value: value.factor * size + value.offset)

    def holds(self, form: Any, size: int) -> bool:
        """Whether a recording's folded form, on arguments of that size, is this one."""
        return _pair(self.at(size), form, _same_numbers) is not _DIFFERENT


def of_any_length(one: Any, size: int, other: Any, other_size: int) -> OfAnyLength | None:
    """The form that two folded ones are of their sizes; ``None`` if they differ in more than such integers, if no loop
    is longer for it, or if what a step does depends on the size, but for strides: a body is compiled for one."""

    def varying(a: int, b: int) -> Any:
        if a == b:
            return a
        factor, left = divmod(b - a, other_size - size)
        return _DIFFERENT if left else Varying(factor, a - factor * size)

    found = None if size == other_size else _pair(one, other, varying)
    if found is None or found is _DIFFERENT:
        return None
    (made, *_), *_ = found
    loops = [each for each in made if isinstance(each, FoldedLoop)]
    is_longer = any(isinstance(loop.steps, Varying) for loop in loops)
    return OfAnyLength(found) if is_longer and not any(map(_has_steps_that_vary, loops)) else None


def _has_steps_that_vary(loop: FoldedLoop) -> bool:
    calls = [row for row in loop.rows if isinstance(row, FoldedCall)]
    given = [(call.args, call.kwargs, call.part, call.number) for call in calls]
    shapes = [form[0] for call in calls for form in call.forms]
    return _varies((given, shapes, [part[4] for part in loop.parts]))


def _varies(form: Any) -> bool:
    """Whether there is an integer that varies in a form."""
    if isinstance(form, tuple | list):
        return any(map(_varies, form))
    if type(form) is dict:
        return any(map(_varies, form.values()))
    if type(form) is slice:
        return _varies((form.start, form.stop, form.step))
    return type(form) is Varying


_DIFFERENT = object()


def _same_numbers(a: int, b: int) -> Any:
    return a if a == b else _DIFFERENT


def _pair(a: Any, b: Any, numbers: Callable[[int, int], Any]) -> Any:
    """Two forms as one, integers as ``numbers`` says; :data:`_DIFFERENT` if they differ otherwise."""
    if a is b and not isinstance(a, int):
        return a
    if type(a) is not type(b):
        return _DIFFERENT
    if type(a) is int:
        return numbers(a, b)
    if isinstance(a, tuple | list):
        if len(a) != len(b):
            return _DIFFERENT
        made = [_pair(one, other, numbers) for one, other in zip(a, b, strict=True)]
        return _DIFFERENT if any(each is _DIFFERENT for each in made) else _like(a, made)
    if type(a) is dict:
        if list(a) != list(b):
            return _DIFFERENT
        made = [_pair(a[key], b[key], numbers) for key in a]
        return _DIFFERENT if any(each is _DIFFERENT for each in made) else dict(zip(a, made, strict=True))
    if type(a) is slice:
        made = [_pair(getattr(a, name), getattr(b, name), numbers) for name in ("start", "stop", "step")]
        return _DIFFERENT if any(each is _DIFFERENT for each in made) else slice(*made)
    if isinstance(a, float):
        return a if key_of(a) == key_of(b) else _DIFFERENT
    return a if a == b else _DIFFERENT


def _mapped(form: Any, change: Callable[[Varying], Any]) -> Any:
    """A form with numbers for what varies."""
    if type(form) is Varying:
        return change(form)
    if isinstance(form, tuple | list):
        return _like(form, [_mapped(each, change) for each in form])
    if type(form) is dict:
        return {key: _mapped(each, change) for key, each in form.items()}
    if type(form) is slice:
        return slice(*(_mapped(each, change) for each in (form.start, form.stop, form.step)))
    return form


def _like(form: Sequence, made: list) -> Any:
    """A sequence of the same type."""
    return type(form)(*made) if hasattr(form, "_fields") else type(form)(made)


def folded(replay: Replay) -> tuple:
    """The folded form of a recording: the calls and loops in order, the results, their structure, and the inputs.

    :class:`NotRecordedError` for what has no such form (yet): draws, numbers that differ from step to step, writes into
    parts of tensors, results of steps in the middle of a loop that are read one by one.
    """
    return _Fold(replay).form()


class _Fold:
    def __init__(self, replay: Replay):
        self.replay, self.calls = replay, replay.calls
        self.called: dict[int, int] = {}  # rows outside of the loops, by their numbers in the form
        if self.calls.drawn:
            raise NotRecordedError("draws in a loop of any length")

    def form(self) -> tuple:
        calls, begins = self.calls, {loop.start: number for number, loop in enumerate(self.replay.loops)}
        made: list[Any] = []
        row = 0
        while row < len(calls.rows):
            if row in begins:
                loop = self.replay.loops[begins[row]]
                made.append(self._loop(loop, begins[row]))
                row = loop.stop
                continue
            if self.replay.is_called(row) and calls.part(calls.rows[row].makes[0]) is None:
                made.append(self._join(row) or self._call(row, self._sources(calls.rows[row].reads)))
                self.called[row] = len(made) - 1
            row += 1
        results = [self._source(leaf.number) if type(leaf) is Value else (leaf,) for leaf in calls.results]
        return tuple(made), tuple(results), calls.spec, tuple(calls.inputs)

    def _source(self, value: int) -> Source:
        row, leaf = self.calls.made[value]
        if row < 0:
            return "input", leaf
        place = self.replay.place(value)
        if place is not None:
            number, step, (index, result) = place
            if not self.replay.is_last(place):
                return "step", number, index, result, step
            return "last", number, index, result
        part = self.calls.part(value)
        if part is not None:
            return "part", self._source(part.of), *part[1:]
        return "made", self.called[row], leaf

    def _sources(self, values: Sequence[int]) -> tuple[Source, ...]:
        return tuple(map(self._source, values))

    def _forms(self, values: Sequence[int]) -> tuple:
        return tuple(tuple(self.calls.forms[value]) for value in values)

    def _call(self, row: int, reads: tuple) -> FoldedCall:
        call = self.calls.rows[row]
        kind = self.calls.kinds[call.kind]
        if call.into is not None:
            raise NotRecordedError("a write in a loop of any length")
        part = None if call.part is None else tuple(call.part[1:])
        forms = self._forms(call.makes)
        return FoldedCall(kind.func, kind.args, kind.kwargs, reads, part, call.number, forms)

    def _join(self, row: int) -> FoldedJoin | None:
        joined = self.replay.joined(self.calls.rows[row])
        if joined is None:
            return None
        stacks, dim, groups = joined
        return FoldedJoin(stacks, dim, tuple(map(self._piece, groups)), self._forms(self.calls.rows[row].makes))

    def _piece(self, values: Sequence[int]) -> Source:
        if len(values) == 1:
            return self._source(values[0])
        number, begin, (index, leaf) = self.replay.place(values[0])
        _, end, _ = self.replay.place(values[-1])
        return "steps", number, index, leaf, begin, end

    def _loop(self, loop: Loop, number: int) -> FoldedLoop:
        if loop.numbers or loop.written:
            raise NotRecordedError("numbers or writes in a loop of any length")
        carries = {carry: place for place, carry in enumerate(loop.carries)}
        parts = {each: place for place, each in enumerate(loop.parts)}

        def role(each: Any) -> tuple:
            match each:
                case Local():
                    return "local", each.row, each.leaf
                case Carry():
                    return "carry", carries[each]
                case Parts():
                    return "part of", parts[each]
                case Constant():
                    return self._source(each.value)

        def whole(each: Parts) -> tuple:
            of = ("of loop", *each.of) if isinstance(each.of, tuple) else self._source(each.of)
            return of, *each[1:]

        def first(carry: Carry) -> tuple:
            before = None if carry.of is None else carries[carry.of]
            return carry.row, carry.leaf, self._source(carry.first), before

        rows: list[Any] = []
        for index, roles in enumerate(loop.roles):
            if index in loop.dead:
                rows.append(None)
            elif roles is None:
                rows.append(parts[loop.taken[index]])
            else:
                call = self._call(loop.start + index, tuple(map(role, roles)))
                last = self.calls.rows[loop.stop - loop.period + index]
                rows.append(call._replace(forms=self._forms(last.makes)))
        reached = sources_of(loop, self.calls)
        return FoldedLoop(
            loop.steps,
            tuple(map(first, carries)),
            tuple(map(whole, parts)),
            tuple(rows),
            tuple(tuple(map(role, reached[carry])) for carry in carries),
            tuple(tuple(each) for each in self.replay.ys(number)),
        )
