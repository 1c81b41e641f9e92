"""Loops of any length: the folded forms of two recorded calls, which differ in one size → one form for all sizes.

They are one forward of that size if they are equal but for integers, each of which is the same multiple of the size
plus the same number in both (:func:`of_any_length`). A further record is proven to be that forward by
:meth:`OfAnyLength.holds`: its folded form is this one at its size, so that it makes the same calls in the same order,
as often as this one says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from bridge.capture.loops.row_form import FoldedCall, FoldedJoin, FoldedLoop
from bridge.capture.observation import Observation, Output
from bridge.state import constant_key

if TYPE_CHECKING:
    from bridge.capture.two_runs import RealRun

__all__ = ["AnyLength", "LoopedCall", "OfAnyLength", "Varying", "comparable", "of_any_length"]


@dataclass(frozen=True)
class Varying:
    """An integer that is ``factor * size + offset``."""

    factor: int
    offset: int


@dataclass(frozen=True)
class OfAnyLength:
    """A form in which integers may be :class:`Varying`."""

    form: Any

    def at(self, size: Any) -> Any:
        """The form of a size, a number or torch's symbol."""
        return _mapped(self.form, lambda value: value.factor * size + value.offset)

    def holds(self, form: Any, size: int) -> bool:
        """Whether the form of a record, on arguments of that size, is this one."""
        return _pair(self.at(size), form, _same_numbers) is not _DIFFERENT


@dataclass(frozen=True, eq=False)
class AnyLength:
    """The forward of a module for all sizes.

    Attributes:
        form: what it does, and what eager returns.
        leaf, dimension: where the size is read, a leaf of the arguments and one of its dimensions.
        proven: sizes for which a record has told that the module's forward is this one.
    """

    form: OfAnyLength
    leaf: int
    dimension: int
    proven: set[int]

    def prove(self, form: Any, size: int) -> bool:
        """Whether the forward of a size is this one, as its record tells; noted if so."""
        if self.form.holds(form, size):
            self.proven.add(size)
        return size in self.proven


@dataclass(frozen=True)
class LoopedCall:
    """A call with loops, run once.

    Attributes:
        real: its run.
        any_length: its loops for all sizes of a dimension; ``None``: they are of this length.
    """

    real: RealRun
    any_length: AnyLength | None = None

    @property
    def observation(self) -> Observation:
        """What eager does."""
        return self.real.observation

    @property
    def form(self) -> tuple | None:
        """What it does and what eager returns, the same for all lengths; ``None`` if that has no such form."""
        return comparable(self.real)

    def of_any_length(self, other: Any, size: int, leaf: int, dimension: int, own: int) -> LoopedCall | None:
        """The call for all sizes of a dimension, ``own`` here, as the form of one of another size tells, too."""
        form = of_any_length(other, size, self.form, own)
        return None if form is None else replace(self, any_length=AnyLength(form, leaf, dimension, {own}))


def comparable(real: RealRun) -> tuple | None:
    """What a call does and what eager returns; ``None`` where it cannot be compared with a call of another length.

    It cannot be with draws, numbers that differ from step to step, writes into parts of tensors and into inputs, and
    what is no input of the call.
    """
    form, observation = real.loops, real.observation
    if form is None or form.last or real.record.reads or real.final or real.functions.uses:
        return None
    for each in form.made:
        if not isinstance(each, FoldedJoin) and each.draw is not None:
            return None
        if isinstance(each, FoldedLoop) and (each.numbers or each.written or each.drops):
            return None
    outputs = [_described(output) for output in observation.outputs]
    if None in outputs or _is_in(("other",), form):
        return None
    return form, tuple(outputs), observation.out_spec, observation.reads_validation


def _described(output: Output) -> tuple | None:
    """What is known of a result; ``None`` where it cannot be compared."""
    value = constant_key(output.value)
    rest = [getattr(output, each.name) for each in fields(output) if each.name != "value"]
    return None if value is None else (value, *rest)


def _is_in(start: tuple, tree: Any) -> bool:
    """Whether a tuple that begins so is in a form."""
    if isinstance(tree, tuple) and tree[: len(start)] == start:
        return True
    return isinstance(tree, tuple | list) and any(_is_in(start, each) for each in tree)


def of_any_length(one: Any, size: int, other: Any, other_size: int) -> OfAnyLength | None:
    """The form that two are of their sizes; ``None`` if they differ in more than such integers, if no loop is longer
    for it, or if what a step does depends on the size, but for strides: a body is compiled for one."""

    def varying(a: int, b: int) -> Any:
        if a == b:
            return a
        factor, left = divmod(b - a, other_size - size)
        return _DIFFERENT if left else Varying(factor, a - factor * size)

    found = None if size == other_size else _pair(one, other, varying)
    if found is None or found is _DIFFERENT:
        return None
    loops = [each for each in found[0].made if isinstance(each, FoldedLoop)]
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
    return type(form) is Varying


def _mapped(form: Any, change: Callable[[Varying], Any]) -> Any:
    if type(form) is Varying:
        return change(form)
    if isinstance(form, tuple | list):
        return _like(form, [_mapped(each, change) for each in form])
    if type(form) is dict:
        return {name: _mapped(each, change) for name, each in form.items()}
    return form


def _like(form: Any, made: list[Any]) -> Any:
    return type(form)(*made) if hasattr(form, "_fields") else type(form)(made)


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
    if isinstance(a, float):
        return a if repr(a) == repr(b) else _DIFFERENT
    return a if a == b else _DIFFERENT
