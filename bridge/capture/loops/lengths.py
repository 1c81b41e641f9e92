"""Loops of any length: two rolled-up records that differ in one size → one form for all sizes.

Two records are one forward of that size if they are equal up to integers, each of which is ``factor * size + offset``
with the same factor and offset in both (:func:`of_any_length`). :meth:`AnyLength.prove` proves that a further record is
that forward: rolled up, it equals the form at its size, so it makes the same calls in the same order and number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from bridge.base.errors import swallowed
from bridge.base.log import channel
from bridge.base.torch_fakes import clear_fake_memo
from bridge.capture.fake_run import FakeRecord, fake_leaves, faking, mode_of
from bridge.capture.loops.operators import FIRST, LAST, PART, STEPS
from bridge.capture.loops.rolled import Rolled, rolled_up
from bridge.capture.observation import Observation
from bridge.capture.real_run import real_run_of
from bridge.capture.rows import Record, ValueRef, leaves_in, mapped, values_in
from bridge.capture.thread_isolation import recording
from bridge.guards import undo
from bridge.state import SampleCall

if TYPE_CHECKING:
    from bridge.capture.real_run import RealRun


class RolledMetadata(NamedTuple):
    """A rolled record as data, which is equal for two records of one function of the inputs.

    Attributes:
        inputs: the number of inputs; greater values are made by rows.
        rows: operator, args, kwargs, results and grad mode of each row.
        layouts: metadata of the values that rows make, in order.
        results: the leaves of the result, values for tensors.
    """

    inputs: int
    rows: list[tuple]
    layouts: list[tuple]
    results: list[Any]


@dataclass(frozen=True)
class Varying:
    """An integer that is ``factor * size + offset``."""

    factor: int
    offset: int


@dataclass(frozen=True, eq=False)
class AnyLength:
    """The forward of a module for all sizes.

    Attributes:
        form: a tuple as of :func:`comparable`, in which integers may be :class:`Varying`.
        leaf, dimension: the argument leaf and its dimension whose size is the length.
        proven: sizes for which a record has proven that the module's forward is this one.
    """

    form: Any
    leaf: int
    dimension: int
    proven: set[int]

    def at(self, size: Any) -> Any:
        """The form at a size, a number or torch's symbol."""
        return mapped(self.form, Varying, lambda value: value.factor * size + value.offset)

    def prove(self, form: Any, size: int) -> bool:
        """Whether a record's ``form`` proves that the forward of a size is this one; adds it to :attr:`proven`."""
        if _pair(self.at(size), form, lambda a, b: a if a == b else _DIFFERENT) is not _DIFFERENT:
            self.proven.add(size)
        return size in self.proven


@dataclass(frozen=True)
class LoopedCall:
    """A call with loops, run once.

    Attributes:
        real: its run.
        any_length: its loops for all sizes of a dimension; ``None``: the loops have this length only.
    """

    real: RealRun
    any_length: AnyLength | None = None

    @property
    def observation(self) -> Observation:
        """Eager metadata."""
        return self.real.observation

    @property
    def form(self) -> tuple | None:
        """The call as comparable data, see :func:`comparable`."""
        return comparable(self.real)

    def of_any_length(self, other: Any, size: int, leaf: int, dimension: int, own: int) -> LoopedCall | None:
        """The call for all sizes of a dimension, from its form at size ``own`` and the form ``other`` at ``size``."""
        form = of_any_length(other, size, self.form, own)
        return None if form is None else replace(self, any_length=AnyLength(form, leaf, dimension, {own}))


def comparable(real: RealRun) -> tuple | None:
    """A call as data: its rolled record, output metadata and result structure.

    ``None`` with short loops, draws, scalar guards, numbers that differ between steps, writes into parts of tensors or
    into inputs, custom autograd Functions, literals or free tensors: two lengths cannot be compared then.
    """
    rolled, observation = real.loops, real.observation
    if rolled is None or not rolled.is_long or rolled.sets or rolled.draws or not rolled.same_steps:
        return None
    if real.record.reads or real.final or real.functions.uses:
        return None
    form = _form_of(rolled, len(real.record.forms))
    outputs = [output.key for output in observation.outputs]
    if form is None or None in outputs:
        return None
    return form, tuple(outputs), observation.out_spec, observation.reads_validation


def _form_of(rolled: Rolled, first: int) -> RolledMetadata | None:
    """A rolled record as data; ``None`` if it reads a value that is no input. ``first``: its rows' first value."""
    record, others = rolled.record, []

    def renamed(value: ValueRef) -> ValueRef:
        if record.inputs <= value.number < first:
            others.append(value)
        return value if value.number < first else ValueRef(value.number - first + record.inputs)

    told = [(row.op, row.args, row.kwargs, row.results, row.grad) for row in record.rows]
    layouts = [(form.shape, form.stride, form.dtype, form.device, form.requires_grad) for form in record.forms[first:]]
    rows, results = mapped((told, rolled.results), ValueRef, renamed)
    return None if others else RolledMetadata(record.inputs, rows, layouts, results)


def of_any_length(one: Any, size: int, other: Any, other_size: int) -> Any | None:
    """The form of which two forms are instances at their sizes. ``None`` if they differ in more than affine integers,
    if no loop gets longer, or if a step depends on the size, strides aside: a loop body is compiled for one size."""

    def dynamic(a: int, b: int) -> Any:
        if a == b:
            return a
        factor, left = divmod(b - a, other_size - size)
        return _DIFFERENT if left else Varying(factor, a - factor * size)

    found = None if size == other_size else _pair(one, other, dynamic)
    if found is None or found is _DIFFERENT:
        return None
    form = found[0]
    is_longer = any(op is FIRST and _varies(args) for op, args, *_ in form.rows)
    return found if is_longer and not _has_steps_that_vary(form) else None


def _has_steps_that_vary(form: RolledMetadata) -> bool:
    """Whether shapes in a step depend on the size, or its operators' arguments do."""
    inside = False
    for op, args, kwargs, results, *_ in form.rows:
        is_given = op in (FIRST, PART)
        inside = is_given or (inside and op not in (LAST, STEPS))
        shapes = [form.layouts[number - form.inputs][0] for number in values_in(results) if number >= form.inputs]
        if inside and _varies((shapes, () if is_given else (args, kwargs))):
            return True
    return False


def _varies(form: Any) -> bool:
    return any(leaves_in(form, Varying))


_DIFFERENT = object()


def _pair(a: Any, b: Any, numbers: Callable[[int, int], Any]) -> Any:
    """Two forms as one, with ``numbers(a, b)`` for integers; :data:`_DIFFERENT` if they differ otherwise."""
    if a is b and not isinstance(a, int):
        return a
    if type(a) is not type(b):
        return _DIFFERENT
    if type(a) is int:
        return numbers(a, b)
    if type(a) is ValueRef:
        return a if a == b else _DIFFERENT
    if isinstance(a, tuple | list):
        if len(a) != len(b):
            return _DIFFERENT
        made = [_pair(one, other, numbers) for one, other in zip(a, b, strict=True)]
        if any(each is _DIFFERENT for each in made):
            return _DIFFERENT
        return type(a)(*made) if hasattr(a, "_fields") else type(a)(made)
    if type(a) is dict:
        if list(a) != list(b):
            return _DIFFERENT
        made = [_pair(a[key], b[key], numbers) for key in a]
        return _DIFFERENT if any(each is _DIFFERENT for each in made) else dict(zip(a, made, strict=True))
    if isinstance(a, float):
        return a if repr(a) == repr(b) else _DIFFERENT
    return a if a == b else _DIFFERENT


# Run of a call with loops of any length: its form for all sizes → rows on fake tensors with a symbol for that size.
#
# Forward does not run: records prove that it is this form at the sample's size and at each further size.


log = channel("dispatch")


def looped_run(call: SampleCall) -> LoopedCall | None:
    """One real run of a call with long loops; ``None`` if it has none, has refusals, or sets Python state."""
    with recording(), undo() as before:
        try:
            real = real_run_of(replace(call, dims=()))
        except Exception as error:  # noqa: BLE001 - forward may raise any error, and raises it again when captured
            swallowed(error)
            log.debug("%s is not recorded for its length: %s", call.name, error)
            before.restore()
            return None
        if real.observation.unsupported or real.observation.objects or real.functions.uses or real.changed():
            before.restore()
            return None
        real.loops = rolled_up(real.record, real.made, real.observation.draws)
    return LoopedCall(real) if real.loops is not None and real.loops.is_long else None


def run_of_any_length(call: LoopedCall, sample: SampleCall) -> FakeRecord:
    """A fake run of a call of any length, made from its form: one step of each loop, the length as a symbol."""
    real, length = call.real, call.any_length
    mode, symbols = mode_of(real, sample.dims)
    fake = faking(mode)
    try:
        given, _ = fake_leaves(mode, sample, real)
        arguments = [each for each in given if isinstance(each, torch.Tensor)]
        count, behind = len(real.given.real_tensors), len(real.given.real_tensors) + len(arguments)
        inputs = [*map(fake, real.given.inputs[:count]), *arguments, *map(fake, real.given.inputs[behind:])]
        form, *_ = length.at(given[length.leaf].shape[length.dimension])
        record, fakes = Record(inputs=form.inputs), dict(enumerate(inputs))
        for like, (op, args, kwargs, made, *_) in zip(real.loops.record.rows, form.rows, strict=True):
            record.rows.append(like._replace(op=op, args=args, kwargs=kwargs, results=made))
        with torch.no_grad(), mode:
            for shape, stride, dtype, device, _ in form.layouts:
                fakes[len(fakes)] = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        record.fakes = fakes
        out_spec = real.observation.out_spec
        return FakeRecord(record, mode, form.results, arguments, out_spec, given, symbols)
    finally:
        clear_fake_memo(mode)
