"""Differences: what a call did on real numbers and on fake tensors → refusals of what the two did differently."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch

from bridge.base.devices import HOST
from bridge.base.errors import Unsupported, line_of
from bridge.base.log import channel
from bridge.base.torch_internals import FakeTensor, aten
from bridge.capture.explain_error import explain_error
from bridge.capture.rows import Form, Record, Row, Value, at_hints, mapped, renamed, values_in, written_operands
from bridge.capture.two_runs import FakeRecord, RealRun

__all__ = ["differences"]

log = channel("dispatch")

_SLICE = aten.slice.Tensor
_NOTHING = object()


def differences(real: RealRun, fake: FakeRecord) -> Iterator[Unsupported]:
    """What the two runs did differently; the first row that is not the same. What fake tensors could not compute."""
    ours, theirs = real.record, fake.record
    for index, error in theirs.told.items():
        where = ours.rows[index].where
        yield explain_error(error, None if where is None else line_of(where))
        return
    rows = [row for row in theirs.rows if row.op is not _SLICE or row.results.number not in theirs.same]
    for index, (a, b) in enumerate(zip(ours.rows, rows, strict=False)):
        if _compared(ours, a) != _compared(theirs, b, of_whole=a.op is aten.alias.default):
            where = "forward" if a.where is None else line_of(a.where)
            there = "gives it other operands" if a.op is b.op else f"calls {b.op}"
            log.debug("row %d: %s\n%s", index, _compared(ours, a), _compared(theirs, b))
            given = _compared(ours, replace(a, results=None)), _compared(theirs, replace(b, results=None))
            if given[0] == given[1]:
                reason = f"on the sample eager gives {_results(ours, a)}, and torch's formula {_results(theirs, b)}"
                yield Unsupported(str(a.op), where, reason)
                return
            reason = f"forward goes another way on fake tensors than on real ones: there it {there}"
            yield Unsupported(str(a.op), where, reason, "do not let it depend on numbers")
            return
    if len(ours.rows) != len(rows):
        reason = f"forward makes {len(rows)} calls on fake tensors and {len(ours.rows)} on real ones"
        yield Unsupported("forward", "forward", reason, "do not let it depend on numbers")
    else:
        yield from _result(real, fake)


def _result(real: RealRun, fake: FakeRecord) -> Iterator[Unsupported]:
    """What differs in the two results; rows are the same."""
    ours, theirs = real.record, fake.record
    objects = list(zip(real.observation.objects, fake.objects, strict=False))
    real.observation.objects, fake.objects = [], []
    for one, other in objects:
        if one is other or real.prepared.twin.has_copied(one) or fake.copies.has_copied(other):
            reason = "is not made by the call; a compiled call would return a copy of it"
            yield Unsupported(f"a result of type {type(one).__name__}", "the module's result", reason)
            return
    found = at_hints(renamed(fake.results, theirs))
    pairs = zip_longest(real.results, found, fillvalue=_NOTHING)
    if not all(_is_same_constant(*pair) for pair in pairs) or real.observation.out_spec != fake.out_spec:
        reason = "forward returns something else each time: a time, a counter, a number from elsewhere"
        yield Unsupported("a result", "the module's result", reason, "return tensors")
        return
    if fake.symbols is None and (row := _aliased_otherwise(ours, theirs)) is not None:
        where = "forward" if row.where is None else line_of(row.where)
        reason = "copies in eager what it views on fake tensors, or the reverse, and one of the two is written"
        yield Unsupported(str(row.op), where, reason, "clone before the write")
    elif fake.symbols is None and not _same_literals(ours, theirs):
        reason = "a tensor is made of numbers in Python that are others each time that forward runs"
        yield Unsupported("a tensor of numbers", "forward", reason, "pass the numbers to forward, or keep them")


def _is_same_constant(one: Any, other: Any) -> bool:
    return type(one) is type(other) and (one is other or one == other or (one != one and other != other))


def _aliased_otherwise(ours: Record, theirs: Record) -> Row | None:
    """The first row that made a view in one run and a copy in the other, of memory that is written; ``None``: there is
    none. Fake tensors may have other strides than real ones: ``reshape`` copies or views by them."""
    differing = {n for n, (a, b) in enumerate(zip(ours.memory, theirs.memory, strict=False)) if a != b}
    if not differing:
        return None
    written = _written(ours) | _written(theirs)
    touched = {n for n in differing if ours.memory[n] in written or theirs.memory[n] in written}
    return next((row for row in ours.rows if not touched.isdisjoint(values_in(row.results))), None)


def _written(record: Record) -> set[int]:
    """The memory that rows write."""
    written = (written_operands(row.op, row.args, row.kwargs) for row in record.rows)
    return {record.memory[number] for operands in written for number in values_in(operands)}


def _same_literals(ours: Record, theirs: Record) -> bool:
    """Whether two runs wrote the same numbers into the tensors that they made, bit by bit."""
    pairs = ((literal, theirs.literals.get(number)) for number, literal in ours.literals.items())
    return all(other is not None and _bits(literal) == _bits(other) for literal, other in pairs)


def _bits(tensor: torch.Tensor) -> bytes:
    known = getattr(tensor, "constant", None) if isinstance(tensor, FakeTensor) else tensor
    return b"" if known is None else bytes(known.detach().to(HOST).contiguous().reshape(-1).view(torch.uint8).tolist())


def _compared(record: Record, row: Row, *, of_whole: bool = False) -> tuple:
    """What is compared of a row, at the sample's sizes.

    ``of_whole``: a part that is the whole there is an alias, as torch's indexing has it for static sizes.
    """

    def plain(tree: Any) -> Any:
        known = mapped(renamed(at_hints(tree), record), Value, lambda v: (v.number, *record.forms[v.number][:4:3]))
        return repr(known)

    op, args, kwargs = row.op, row.args, row.kwargs
    if of_whole and op is _SLICE and _form(record, args[0]).shape == _form(record, row.results).shape:
        op, args, kwargs = aten.alias.default, args[:1], {}
    return op, plain((args, kwargs)), plain(row.results), row.grad, row.autocast


def _results(record: Record, row: Row) -> str:
    """The results of a row as a user reads of them."""
    forms = [record.forms[number] for number in values_in(renamed(row.results, record))]
    return ", ".join(f"{form.dtype} of shape {list(form.shape)}" for form in forms) or repr(row.results)


def _form(record: Record, value: Value) -> Form:
    return record.forms[renamed(value, record).number]
