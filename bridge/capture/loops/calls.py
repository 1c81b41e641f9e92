"""Recorded calls: what forward calls of torch, one row each, in a form in which rows can be compared and called again.

A tensor is a *value*, a number: an input, or made by a call before. Two rows of one kind call the same function with
the same constants on tensors of the same layouts, and get results of the same layouts; of rows that take a part of a
tensor (``x[:, 3]``), where the part begins may differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from bridge.capture.observation import Draw

__all__ = [
    "CREATING",
    "HERE",
    "NUMBER",
    "Call",
    "Calls",
    "Form",
    "Kind",
    "Made",
    "Part",
    "Value",
    "filled",
    "numbered",
    "part_of",
    "part_written",
    "values_in",
]


HERE = object()
"""Stands for a tensor in the arguments of a kind."""

NUMBER = object()
"""Stands for a number in the arguments of a kind whose rows may have different ones."""

NUMBERED = frozenset(
    [f"__{side}{name}__" for name in ("add", "sub", "mul", "truediv") for side in ("", "r")]
    + ["add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "rsub", "__rdiv__", "__div__"]
)
"""Functions of a tensor and a number that do the same with a tensor of that number, if both are of 32 or 64 bits."""

COMPARING = frozenset(form.format(name) for name in ("lt", "le", "gt", "ge", "eq", "ne") for form in ("{}", "__{}__"))
"""Functions that compare a tensor with a number as with a tensor of that number, of its type."""

_WHOLE = 2**53
"""Integers from which on not all are numbers of 64 bits."""

_NUMBERS_OF_SUMS = {torch.float32: (int, float), torch.float64: (int, float)}
_NUMBERS: dict[torch.dtype, tuple[type, ...]] = {**_NUMBERS_OF_SUMS, torch.int64: (int,)}
"""Types of Python's numbers that are numbers of an element type, up to rounding."""

CREATING = frozenset({"full", "new_full", "full_like", "tensor", "scalar_tensor"})
"""Functions whose result has one number everywhere."""


class Value(NamedTuple):
    """Stands for a tensor in what forward returns."""

    number: int


class Form(NamedTuple):
    """The layout of a value and the device it lies on, and whether autograd follows it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @property
    def layout(self) -> tuple:
        """All but whether autograd follows it, which may begin with a loop's first step."""
        return self[:4]

    @property
    def is_contiguous(self) -> bool:
        """Whether it is dense, its last axis innermost."""
        return torch.empty_strided(self.shape, self.stride, device="meta").is_contiguous()


class Made(NamedTuple):
    """Where a value comes from: the ``leaf``-th result of a row; of an input, row -1 and its number."""

    row: int
    leaf: int


class Part(NamedTuple):
    """``extent`` slices of a value from ``begin`` on, along ``dim``; ``squeezed``: one of them, without the axis."""

    of: int
    dim: int
    begin: int
    extent: int
    squeezed: bool


@dataclass(frozen=True)
class Kind:
    """What equal rows do: ``func(*args, **kwargs)``, with :data:`HERE` in the place of each tensor."""

    func: Any
    args: tuple
    kwargs: dict[str, Any]
    through: tuple[int, ...] = ()
    targets: int = 0

    @property
    def name(self) -> str:
        """Of the function."""
        return getattr(self.func, "__name__", "")


class Call(NamedTuple):
    """A row.

    Attributes:
        kind: the number of its kind.
        reads, makes: the values among the arguments, as often as they are there; those of the result, in order.
        part: what it takes, if it takes one part of a tensor.
        into: what it writes, if it writes one part of a tensor: it reads the whole as it was and the part's new value,
            and makes the whole as it is then.
        number: its only number, which may differ between rows of one kind: of :data:`NUMBERED` or :data:`CREATING`.
    """

    kind: int
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    part: Part | None = None
    into: Part | None = None
    number: int | float | None = None


@dataclass
class Calls:
    """The rows of a run.

    Attributes:
        rows: in order.
        kinds: by their numbers.
        forms, made: of each value.
        drawn: what rows draw, by their numbers.
        inputs: what each of the first values is: the number of an argument, or the name of a tensor of the module.
        results: the leaves of what forward returned, values for tensors; ``spec``: their structure.
    """

    rows: list[Call] = field(default_factory=list)
    kinds: list[Kind] = field(default_factory=list)
    forms: list[Form] = field(default_factory=list)
    made: list[Made] = field(default_factory=list)
    drawn: dict[int, Draw] = field(default_factory=dict)
    inputs: list[int | str] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    spec: Any = None
    effects: set[int] = field(default_factory=set)

    @property
    def needed(self) -> set[int]:
        """The values that are returned."""
        return set(values_in(self.results))

    def part(self, value: int) -> Part | None:
        """Of which value this one is a part, if one call has made it that."""
        row, leaf = self.made[value]
        if row < 0:
            return None
        call = self.rows[row]
        return call.part if call.part is not None else self._item(call, leaf)

    def _item(self, call: Call, leaf: int) -> Part | None:
        """One of the parts that ``unbind``, ``chunk`` or ``split`` makes."""
        kind = self.kinds[call.kind]
        name, args = kind.name, kind.args
        if name not in ("unbind", "chunk", "split") or not call.reads or len(call.makes) < 2:
            return None
        of = call.reads[0]
        whole, first = self.forms[of].shape, self.forms[call.makes[0]].shape
        given = args[1] if len(args) > 1 else 0
        dim = kind.kwargs.get("dim", given if name == "unbind" else args[2] if len(args) > 2 else 0)
        if type(dim) is not int or any(self.forms[made].shape != first for made in call.makes):
            return None
        dim %= len(whole)
        if name == "unbind":
            return Part(of, dim, leaf, 1, True)
        return Part(of, dim, leaf * first[dim], first[dim], False)


def values_in(arg: Any) -> list[int]:
    """The values in an argument or a result, in order."""
    if type(arg) is Value:
        return [arg.number]
    if isinstance(arg, tuple | list):
        return [value for item in arg for value in values_in(item)]
    if isinstance(arg, dict):
        return [value for item in arg.values() for value in values_in(item)]
    return []


def filled(arg: Any, given: Iterator[Any], number: Any = None) -> Any:
    """An argument of a kind with these in the places of tensors, in order, and the number in its place."""
    if arg is HERE:
        return next(given)
    if arg is NUMBER:
        return number
    if type(arg) is tuple or type(arg) is list:
        return type(arg)(filled(item, given, number) for item in arg)
    if type(arg) is dict:
        return {name: filled(item, given, number) for name, item in arg.items()}
    return arg


def numbered(name: str, args: tuple, kwargs: dict[str, Any], reads: Sequence[Form]) -> tuple[tuple, Any]:
    """Arguments with :data:`NUMBER` in the place of the one number in which calls of a kind may differ -> they, and it.

    The arguments themselves and ``None`` for a call that has none.
    """
    if name in NUMBERED or name in COMPARING:
        kinds: tuple[type, ...] = ()
        if len(args) == 2 and not kwargs and len(reads) == 1:
            kinds = _NUMBERS.get(reads[0].dtype, ()) if name in COMPARING else _NUMBERS_OF_SUMS.get(reads[0].dtype, ())
        places = [place for place, arg in enumerate(args) if type(arg) in kinds]
    elif name in CREATING:
        places = [place for place, arg in enumerate(args) if type(arg) in (int, float)]
    else:
        places = []
    if len(places) != 1 or abs(args[places[0]]) >= _WHOLE:
        return args, None
    (place,) = places
    return (*args[:place], NUMBER, *args[place + 1 :]), args[place]


def part_written(args: tuple, kwargs: dict[str, Any], of: int, form: Form) -> Part | None:
    """The part of its first argument, value ``of``, that a call of ``__setitem__`` writes; ``None`` for any other."""
    return None if kwargs or len(args) != 3 else _indexed(args[1], of, form)


def part_of(func: Any, args: tuple, kwargs: dict[str, Any], of: int, form: Form) -> Part | None:
    """The part of its first argument, value ``of``, that a call takes: ``x[:, 3]``, ``x[3:5]``, ``select``, ``narrow``.

    ``None`` for any other call.
    """
    name = getattr(func, "__name__", "")
    rank = len(form.shape)
    if name == "__getitem__" and len(args) == 2:
        return _indexed(args[1], of, form)
    if name not in ("select", "narrow") or kwargs or len(args) != (3 if name == "select" else 4):
        return None
    if any(type(arg) is not int for arg in args[1:]) or not rank:
        return None
    dim = args[1] % rank
    begin = args[2] + (form.shape[dim] if args[2] < 0 else 0)
    return Part(of, dim, begin, 1, True) if name == "select" else Part(of, dim, begin, args[3], False)


def _indexed(index: Any, of: int, form: Form) -> Part | None:
    index = index if type(index) is tuple else (index,)
    if any(type(each) not in (int, slice, type(Ellipsis)) for each in index):
        return None
    if sum(each is Ellipsis for each in index) > 1 or len(index) - (Ellipsis in index) > len(form.shape):
        return None
    found, dim = None, 0
    for each in index:
        if each is Ellipsis:
            dim += len(form.shape) - (len(index) - 1)
            continue
        if each != slice(None):
            if found is not None:
                return None
            found = _along(each, of, dim, form.shape[dim])
            if found is None:
                return None
        dim += 1
    return found


def _along(index: int | slice, of: int, dim: int, extent: int) -> Part | None:
    if type(index) is int:
        return Part(of, dim, index + (extent if index < 0 else 0), 1, True)
    if any(type(each) not in (int, type(None)) for each in (index.start, index.stop, index.step)):
        return None
    begin, end, step = index.indices(extent)
    return Part(of, dim, begin, end - begin, False) if step == 1 and end > begin else None
