"""Periods: the bindings of a function -> runs of them that look alike every so many bindings.

Two bindings look alike if they call the same operator with the same attributes and literals, on operands of the same
types: where a slice begins, and which item of a tuple is taken, may differ. What looks alike is compared exactly by
:mod:`autodiff.scan.prove`; a run is only where that is worth trying.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from tvm_ffi import StructuralKey

from autodiff.body import Binding
from autodiff.ir import VARS, Call, Expr, Tuple, TupleGetItem, op_name

__all__ = ["PeriodicRun", "periodic", "place_of", "runs"]

_SLICE = "relax.strided_slice"


class PeriodicRun(NamedTuple):
    """Bindings ``start`` to ``start + length`` of which each looks like the one ``period`` later, as far as there is
    one in the run."""

    start: int
    period: int
    length: int


def runs(bindings: Sequence[Binding], least: int) -> Iterator[PeriodicRun]:
    """Runs of at least ``least`` whole periods, see :func:`periodic`."""
    return periodic([_key(each.value) for each in bindings], least)


def periodic(keys: Sequence[Hashable], least: int) -> Iterator[PeriodicRun]:
    """Runs of at least ``least`` whole periods: longest first, of equally long ones the shortest period first.

    Left out are runs in a longer one whose period divides theirs. What looks alike has equal keys.
    """
    known: dict[Hashable, int] = {}
    numbers = np.array([known.setdefault(key, len(known)) for key in keys], dtype=np.int64)
    found: list[PeriodicRun] = []
    for period in _periods(numbers, least):
        stretches = _stretches(numbers[:-period] == numbers[period:], (least - 1) * period)
        found += [PeriodicRun(start, period, alike + period) for start, alike in stretches]
    found.sort(key=lambda run: (-run.length, run.period))
    taken: list[PeriodicRun] = []
    for run in found:
        if not any(_repeats(run, other) for other in taken):
            taken.append(run)
            yield run


def _periods(keys: np.ndarray, least: int) -> list[int]:
    """The distances between neighbours that look alike, of one binding or of some in a row: a period is the distance of
    two of which there is one in each step."""
    found: set[int] = set()
    most = len(keys) // least
    words = keys
    for width in (1, 2, 4, 8):
        order = np.argsort(words, kind="stable")
        same = words[order[1:]] == words[order[:-1]]
        gaps, counts = np.unique((order[1:] - order[:-1])[same], return_counts=True)
        found.update(gaps[(counts >= least - 1) & (gaps <= most)].tolist())
        if len(words) <= width:
            break
        pairs = np.stack([words[:-width], words[width:]], axis=1)
        words = np.unique(pairs, axis=0, return_inverse=True)[1].reshape(-1)
    return sorted(found)


def _stretches(alike: np.ndarray, least: int) -> list[tuple[int, int]]:
    """Where at least so many true values stand in a row, and how many."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], alike.view(np.int8), [0]))))
    pairs = zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
    return [(start, stop - start) for start, stop in pairs if stop - start >= least]


def _repeats(run: PeriodicRun, other: PeriodicRun) -> bool:
    """Whether a run lies in another one whose period divides its own."""
    inside = other.start <= run.start and run.start + run.length <= other.start + other.length
    return inside and run.period % other.period == 0


def place_of(value: Expr) -> tuple[int, ...]:
    """What may differ between values that look alike: where a slice begins and ends, or which item is taken."""
    if type(value) is TupleGetItem:
        return (value.index,)
    if op_name(value) == _SLICE:
        return tuple(int(number) for arg in value.args[2:4] for number in arg.fields)
    return ()


def _key(value: Expr) -> Hashable:
    kind = type(value)
    if kind is Call:
        attrs = None if value.attrs is None else StructuralKey(value.attrs)
        args = value.args[:]
        if op_name(value) == _SLICE:
            args = [*args[:2], *args[4:]]
        return (op_name(value) or StructuralKey(value.op), attrs, StructuralKey(value.ty), *map(_key, args))
    if kind in VARS:
        return "var", StructuralKey(value.ty)
    if kind is Tuple:
        return ("tuple", *map(_key, value.fields[:]))
    if kind is TupleGetItem:
        return "item", StructuralKey(value.ty), _key(value.tuple_value)
    return StructuralKey(value)
