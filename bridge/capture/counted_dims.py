"""Counted dimensions: numbers that forward reads and uses as sizes → symbols, which have another value in each call.

``x[mask]`` has as many rows as the mask has set elements, ``x[:, : lengths.max()]`` as many columns as the longest
sequence. A call computes these numbers from its inputs before its forward (:mod:`bridge.capture.precall_guards`). If
they are dynamic, the fake run gives forward a symbol for each: the size of a tensor without elements, which is a
further input of the graph. Conditions on the symbol become guards, as for an argument's size.
"""

from __future__ import annotations

import copy
import linecache
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from bridge.base.devices import current_device
from bridge.base.torch_internals import FakeTensorMode
from bridge.base.torch_shapes import expression, symbolic_fake
from bridge.capture.rows import Record, values_in, written
from bridge.capture.sample import ALL_COUNTS, LEAST, DynamicDim

MAX_NUMBERS = 32
"""The longest list of numbers that become symbols; the numbers of a longer list stay constant."""


def sized(number: int, device: torch.device | None = None) -> torch.Tensor:
    """A bool tensor of shape ``(number, 0)``, by default on the current device."""
    return torch.empty((number, 0), dtype=torch.bool, device=device or current_device())


class CountedDims:
    """The symbols of the numbers in a fake run; numbers less than two have none.

    Args:
        record: the real run's record.
        trains: inputs that require grad; numbers that depend on them have no symbol.

    Attributes:
        fakes: the tensors without elements whose sizes are the symbols.
    """

    def __init__(self, mode: FakeTensorMode, record: Record, trains: Sequence[int]):
        self.fakes: list[Any] = []
        self._mode = mode
        self._given: dict[int, list[Any]] = {}
        self._made: dict[int, list[Any]] = {}
        late = _late(record, trains)
        for place, read in enumerate(record.reads):
            kind, value = read.reading.dtype, read.given
            if kind.is_floating_point or kind.is_complex or kind is torch.bool:
                continue
            if record.memory[read.numbers.number] in late:
                continue
            numbers = value if type(value) is list else [value]
            if len(numbers) <= MAX_NUMBERS and {*map(type, numbers)} == {int}:
                self._made[place] = [self._new(each) if each >= LEAST else None for each in numbers]
                pairs = zip(numbers, self._made[place], strict=True)
                self._given[place] = [each if made is None else made.shape[0] for each, made in pairs]

    def _new(self, number: int) -> Any:
        self.fakes.append(symbolic_fake(self._mode, sized(number), {0}, f"count_{len(self.fakes)}"))
        return self.fakes[-1]

    def given(self, place: int, value: Any) -> Any:
        """The value that forward gets for its read number ``place``: symbols, or a copy of eager's ``value``."""
        if (made := self._given.get(place)) is None:
            return copy.copy(value)
        return list(made) if type(value) is list else made[0]

    def end(self) -> None:
        """Drops the symbols that the run has fixed to the sample's number; called after the run."""
        sizes = [(each, each.shape[0]) for each in self.fakes]
        self.fakes = [each for each, size in sizes if type(size) is not int and not expression(size).is_number]

    def of(self, place: int) -> tuple[int | None, ...]:
        """For each number of read ``place``, the index of its symbol or ``None``; empty if none has a symbol."""
        index = {id(each): index for index, each in enumerate(self.fakes)}
        found = tuple(index.get(id(each)) for each in self._made.get(place, ()))
        return () if set(found) == {None} else found

    def dims(self, first: int) -> list[DynamicDim]:
        """The tensors' sizes as dynamic dimensions; ``first``: the leaf index of the first tensor."""
        return [replace(ALL_COUNTS, leaf=first + place, name=f"count_{place}") for place in range(len(self.fakes))]


def _late(record: Record, trains: Sequence[int]) -> set[int]:
    """The memory of values that depend on the inputs ``trains`` or on draws."""
    found = {record.memory[number] for number in trains}
    for row in record.rows:
        read = {record.memory[number] for number in values_in((row.args, row.kwargs))}
        if row.draws[0] != row.draws[1] or not found.isdisjoint(read):
            found |= {record.memory[number] for number in values_in(written(row))}
            found |= {record.memory[number] for number in values_in(row.results)} - read  # without views of operands
    return found


def _compares_types(names: dict[str, Any]) -> bool:
    """Whether a module's source seems to compare a type with ``int``."""
    lines = linecache.getlines(names.get("__file__") or "")
    return any(map(_TYPE.search, lines))


_TYPE = re.compile(r"(\bis|\bnot|=|\bin\s*[(\[{][^)\]}]*)\s*\bint\b(?!\()")


class _Integer(type):
    """The type of a stand-in for ``int``."""

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, int | torch.SymInt)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, int)


@contextmanager
def integers_as_symbols(names: Sequence[dict[str, Any]], read: Callable[[torch.Tensor], Any]) -> Iterator[None]:
    """While active, in this thread and in code with these globals: ``int(x)`` of a tensor is ``read(x)``, and
    ``len(x)`` its size, which may be a symbol.

    Python accepts only an integer from ``Tensor.__int__`` and ``__len__``, and so fixes a symbol. Code that compares
    types with ``int`` keeps the builtin, because other threads may run it.
    """
    thread = threading.get_ident()

    class Integer(int, metaclass=_Integer):
        def __new__(cls, value: Any = 0, *base: Any, **others: Any) -> Any:
            here = threading.get_ident() == thread and not (base or others)
            if here and isinstance(value, torch.Tensor) and value.numel() == 1:
                return read(value)
            return value if here and isinstance(value, torch.SymInt) else int(value, *base, **others)

    def length(value: Any) -> Any:
        here = threading.get_ident() == thread and isinstance(value, torch.Tensor) and value.dim()
        return value.shape[0] if here else len(value)

    added = [(each, "int", Integer) for each in names if not _compares_types(each)]
    added = [each for each in (*added, *((each, "len", length) for each in names)) if each[1] not in each[0]]
    for each, name, other in added:
        each[name] = other
    try:
        yield
    finally:
        for each, name, _ in added:
            del each[name]
