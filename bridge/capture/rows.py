"""Record of a run: one row for each operator that forward called, and the tensors that rows read and made.

Each tensor is a *value*, a number: first the run's inputs, in order, then the results of rows. A row has
:class:`ValueRef` in the place of each tensor among its operands and results.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch

from bridge.base.torch_internals import FakeTensor, OpOverload, aten, schema, storage_id
from bridge.base.torch_shapes import SYMBOLIC, hint
from bridge.state import constant_key


class ValueRef(NamedTuple):
    """A reference to a value, in the place of a tensor."""

    number: int


class NumberRead(NamedTuple):
    """Numbers that forward read: their scalar guard, the value that holds them, and the Python value they became."""

    reading: Any
    numbers: ValueRef
    given: Any


class Form(NamedTuple):
    """Metadata of a tensor when it was made: layout, dtype, device, whether autograd tracks it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    is_conj: bool = False
    is_neg: bool = False

    @property
    def layout(self) -> tuple:
        """The metadata in which the steps of a loop agree; a first step may turn ``requires_grad`` on."""
        return self.shape, self.stride, self.dtype, self.device


class Row(NamedTuple):
    """One call of an operator.

    Attributes:
        op: the overload.
        args, kwargs: its operands: constants, and values for tensors.
        results: its results, in their structure: values for tensors, numbers.
        grad: whether grad mode was on, or the row is inside of a custom autograd Function, where it has no effect.
        draws: the numbers of draws before and after it.
        where: the user's line, as ``(file name, line)``.
        path: dotted path of the innermost module that ran.
    """

    op: Any
    args: tuple
    kwargs: dict[str, Any]
    results: Any
    grad: bool
    draws: tuple[int, int]
    where: tuple[str, int] | None
    path: str


@dataclass
class Record:
    """The record of a run.

    Attributes:
        rows: the rows, in order.
        forms: metadata of each value when it was made.
        memory: for each value, the first value in its memory; negative where the memory is unknown.
        inputs: the number of values that are inputs of the run.
        differentiates: whether forward runs a backward, so that composite operators are opened.
        literals: values of numbers written in the code → a copy of the tensor.
        free: values that are neither inputs nor made by rows → (the tensor, the row that first read it).
        reads: numbers that forward read, in order.
        fakes: in a fake run, the fake tensors of values, outside of autograd's graph; replayed rows have none.
        raised: (number of rows before, operator) → the types of errors that calls raised instead of making a row.
        same: in a run on symbolic sizes, slices that span the whole at the sample's sizes → the value of the whole.
            Their numbers are negative, because a real run lacks them.
        followed: for each higher-order operator (:mod:`bridge.capture.higher_order`), the values whose gradients are
            zeros; ``None`` for an operator that autograd does not track.
    """

    rows: list[Row] = field(default_factory=list)
    forms: list[Form] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    inputs: int = 0
    differentiates: bool = False
    literals: dict[int, torch.Tensor] = field(default_factory=dict)
    free: dict[int, tuple[torch.Tensor, int]] = field(default_factory=dict)
    reads: list[NumberRead] = field(default_factory=list)
    fakes: dict[int, torch.Tensor] = field(default_factory=dict)
    raised: dict[tuple[int, Any], list[type[Exception]]] = field(default_factory=dict)
    same: dict[int, int] = field(default_factory=dict)
    followed: list[list[int] | None] = field(default_factory=list)

    def place_of(self, func: Any) -> tuple[int, Any]:
        """The key of the next call in :attr:`raised`."""
        return len(self.rows) - len(self.same), func

    def raises(self, func: Any, real: Record | None) -> type[Exception] | None:
        """The type of the error that the next call, of ``func``, raised in the real run; ``None`` if it raised none."""
        place = self.place_of(func)
        errors = [] if real is None else real.raised.get(place, [])
        return next(iter(errors[len(self.raised.get(place, [])) :]), None)


@contextmanager
def errors_noted(record: Record, func: Any, real: Record | None) -> Iterator[None]:
    """While active, notes the type of an operator's error; a fake run (``real`` given) raises the real run's type."""
    try:
        yield
    except _OF_SHAPES as error:
        wanted = record.raises(func, real) or type(error)
        record.raised.setdefault(record.place_of(func), []).append(wanted)
        if wanted is type(error) or type(error) not in _OF_SHAPES:
            raise
        raise wanted(*error.args) from error


_OF_SHAPES = (ValueError, RuntimeError, IndexError, TypeError)


def form_of(tensor: torch.Tensor) -> Form:
    """The metadata of a tensor, with the sample's numbers for symbolic sizes."""
    is_strided, is_fake = tensor.layout is torch.strided, type(tensor) is FakeTensor
    shape, stride = tuple(tensor.shape), tensor.stride() if is_strided else ()
    offset = tensor.storage_offset() if is_strided else 0
    if not (type(tensor) is torch.Tensor or (is_fake and tensor.fake_mode.shape_env is None)):
        shape, stride, offset = tuple(map(hint, shape)), tuple(map(hint, stride)), hint(offset)
    device = tensor.fake_device if is_fake else tensor.device  # a fake's ``device`` would go through the modes
    return Form(shape, stride, offset, tensor.dtype, device, tensor.requires_grad, tensor.is_conj(), tensor.is_neg())


_PLAIN = frozenset((type(None), bool, int, float))


def mapped(tree: Any, kind: type | tuple[type, ...], change: Any) -> Any:
    """Operands or results with ``change(each)`` in the place of each leaf of type ``kind``."""
    if type(tree) in _PLAIN:  # no ``kind`` is a plain type
        return tree
    if isinstance(tree, kind):
        return change(tree)
    if type(tree) in (tuple, list):
        return type(tree)([each if type(each) in _PLAIN else mapped(each, kind, change) for each in tree])
    if isinstance(tree, tuple | list) and not isinstance(tree, torch.Size):
        made = [mapped(each, kind, change) for each in tree]
        return type(tree)(*made) if hasattr(tree, "_fields") else type(tree)(made)
    if type(tree) is dict:
        return {name: mapped(each, kind, change) for name, each in tree.items()}
    return tree


def key_of(tree: Any, kind: type | tuple[type, ...], of: Any) -> Any:
    """Operands as a key: equal for equal structure and constants, and equal ``of(each)`` of leaves of type ``kind``.

    Raises:
        TypeError: an operand cannot be compared with another one.
    """
    if isinstance(tree, kind):
        return of(tree)
    if isinstance(tree, tuple | list):
        return (isinstance(tree, list), *[key_of(each, kind, of) for each in tree])
    if isinstance(tree, dict):
        return tuple([(name, key_of(each, kind, of)) for name, each in tree.items()])
    if (key := constant_key(tree)) is None:
        raise TypeError(f"an argument of type {type(tree).__name__}")
    return key


def at_hints(tree: Any) -> Any:
    """Operands or results with the sample's sizes for symbolic ones."""
    return mapped(tree, SYMBOLIC, hint)


def renamed(tree: Any, record: Record) -> Any:
    """Operands or results with the real run's values in place of the values of ``record``."""
    return mapped(tree, ValueRef, lambda value: ValueRef(record.same.get(value.number, value.number)))


def leaves_in(tree: Any, kind: type) -> Iterator[Any]:
    """The leaves of type ``kind`` in operands or results, in order."""
    if isinstance(tree, kind):
        yield tree
    elif isinstance(tree, list | tuple):
        for each in tree:
            yield from leaves_in(each, kind)
    elif isinstance(tree, dict):
        for each in tree.values():
            yield from leaves_in(each, kind)


def values_in(tree: Any) -> Iterator[int]:
    """The numbers of the values in operands or results, in order."""
    return (value.number for value in leaves_in(tree, ValueRef))


_STATISTICS = {aten.batch_norm.default: (3, 4), aten.instance_norm.default: (3, 4)}
"""Positions of running statistics, which an operator writes although its schema does not say so."""


@cache
def _written_places(op: Any) -> list[tuple[int, str]]:
    arguments = list(enumerate(schema(op).arguments)) if isinstance(op, OpOverload) else []
    told = [place for place, each in arguments if each.alias_info is not None and each.alias_info.is_write]
    return [(place, each.name) for place, each in arguments if place in (*told, *_STATISTICS.get(op, ()))]


def written_operands(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The operands that an operator writes."""
    return [args[place] if place < len(args) else kwargs.get(name) for place, name in _written_places(op)]


def may_write(op: Any) -> bool:
    """Whether an operator writes operands."""
    return bool(_written_places(op))


def written(row: Row) -> list[Any]:
    """The operands that a row writes."""
    return written_operands(row.op, row.args, row.kwargs)


def memory_of(tensor: torch.Tensor) -> int | None:
    """An id of a tensor's memory, valid while it lives; ``None`` for a tensor without memory of its own (a wrapper)."""
    try:
        return storage_id(tensor)
    except (NotImplementedError, RuntimeError):
        return None
