"""Differences: what a call did on real numbers and on fake tensors → refusals of what the two did differently."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import torch

from bridge.base.devices import HOST
from bridge.base.errors import Unsupported, line_of
from bridge.base.log import channel
from bridge.base.torch_internals import FakeTensor, aten
from bridge.base.torch_shapes import SYMBOLIC, hint
from bridge.capture.rows import Form, Record, Row, ValueRef, at_hints, renamed, values_in
from bridge.capture.two_runs import FakeRecord, RealRun

__all__ = ["differences", "same_numbers"]

log = channel("dispatch")

_SLICE = aten.slice.Tensor
_NOTHING = object()


def differences(real: RealRun, fake: FakeRecord) -> Iterator[Unsupported]:
    """What the two runs did differently; the first row that is not the same."""
    ours, theirs = real.record, fake.record
    rows = [row for row in theirs.rows if row.op is not _SLICE or row.results.number not in theirs.same]
    for index, (a, b) in enumerate(zip(ours.rows, rows, strict=False)):
        if a is not b and not _is_same(ours, a, theirs, b):
            where = "forward" if a.where is None else line_of(a.where)
            there = "gives it other operands" if a.op is b.op else f"calls {b.op}"
            log.debug("row %d: %s\n%s", index, a, b)
            if _is_same(ours, a, theirs, b, given=True):
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
    if fake.symbols is None and not _same_literals(ours, theirs):
        reason = "a tensor is made of numbers in Python that are others each time that forward runs"
        yield Unsupported("a tensor of numbers", "forward", reason, "pass the numbers to forward, or keep them")


def _is_same_constant(one: Any, other: Any) -> bool:
    return type(one) is type(other) and (one is other or one == other or (one != one and other != other))


def _same_literals(ours: Record, theirs: Record) -> bool:
    """Whether two runs wrote the same numbers into the tensors that they made, bit by bit."""
    pairs = ((literal, theirs.literals.get(number)) for number, literal in ours.literals.items())
    return all(other is not None and same_numbers(literal, other) for literal, other in pairs)


def same_numbers(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors that were made of numbers in Python hold the same, bit by bit."""
    return one.dtype == other.dtype and one.shape == other.shape and _bits(one) == _bits(other)


def _bits(tensor: torch.Tensor) -> bytes:
    known = getattr(tensor, "constant", None) if isinstance(tensor, FakeTensor) else tensor
    return b"" if known is None else bytes(known.detach().to(HOST).contiguous().reshape(-1).view(torch.uint8).tolist())


def _is_same(ours: Record, a: Row, theirs: Record, b: Row, *, given: bool = False) -> bool:
    """Whether two rows are the same at the sample's sizes; ``given``: but for their results.

    A part that is the whole there is an alias, as torch's indexing has it for static sizes.
    """
    op, args, kwargs = b.op, b.args, b.kwargs
    if a.op is aten.alias.default and op is _SLICE and _form(theirs, args[0]).shape == _form(theirs, b.results).shape:
        op, args, kwargs = aten.alias.default, args[:1], {}
    if a.op is not op or a.grad != b.grad or a.autocast != b.autocast:
        return False
    pairs = ((a.args, args), (a.kwargs, kwargs), *(() if given else ((a.results, b.results),)))
    return all(_is_same_tree(ours, one, theirs, other) for one, other in pairs)


def _is_same_tree(ours: Record, one: Any, theirs: Record, other: Any) -> bool:
    """Whether operands or results are: constants, values, and the shapes and types of these."""
    if type(other) in SYMBOLIC:
        other = hint(other)
    if type(one) is ValueRef and type(other) is ValueRef:
        number = theirs.same.get(other.number, other.number)
        return one.number == number and ours.forms[number][:4:3] == theirs.forms[number][:4:3]
    if isinstance(one, tuple | list) and type(one) is type(other):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(_is_same_tree(ours, a, theirs, b) for a, b in pairs)
    if type(one) is dict and type(other) is dict:
        return list(one) == list(other) and all(_is_same_tree(ours, one[key], theirs, other[key]) for key in one)
    is_constant = type(one) is type(other) and not isinstance(one, torch.UntypedStorage)
    return one is other or (is_constant and repr(one) == repr(other))


def _results(record: Record, row: Row) -> str:
    """The results of a row as a user reads of them."""
    forms = [record.forms[number] for number in values_in(renamed(row.results, record))]
    return ", ".join(f"{form.dtype} of shape {list(form.shape)}" for form in forms) or repr(row.results)


def _form(record: Record, value: ValueRef) -> Form:
    return record.forms[renamed(value, record).number]
