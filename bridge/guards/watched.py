"""Watched state: one place that forward read → what it holds now, whether that is what it held, and how it is put back.

The same objects serve a run (what did it change?) and a guard (does a call read the same?).
"""

from __future__ import annotations

import threading
import types
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from operator import is_
from types import CellType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn

from bridge.guards.kinds import answer_of, contents_of, is_a, put_back
from bridge.state import same

__all__ = [
    "ABSENT",
    "Answer",
    "Cell",
    "Class",
    "ClassName",
    "Code",
    "Contents",
    "Name",
    "Place",
    "Slot",
    "alike",
    "class_entry",
    "slot_of",
]

ABSENT = object()
_LOCAL = threading.local


class Place(NamedTuple):
    """How a place is called.

    Attributes:
        kind, text, of: as in ``attribute 'scale' of the module``, ``global 'cfg.scale'``.
        root: as a refusal calls it: ``self.cfg``, ``global 'cfg'``.
    """

    kind: str
    text: str
    of: str = ""
    root: str = ""

    def then(self, more: str) -> Place:
        """The place of something inside; inside of an attribute of a module it is that attribute."""
        return self if self.root else Place(self.kind or "attribute", self.text + more, self.of)

    def __str__(self) -> str:
        return f"{self.kind} '{self.text}'{self.of}" if self.kind else self.text

    @property
    def changed(self) -> str:
        return self.root or str(self)


@dataclass(eq=False)
class Name:
    """A name in a namespace: of a file, of an object, a key of a dictionary; or that there is none.

    Attributes:
        space: the dictionary. ``running``: the one that the run had in its place, if that is another one.
        exact: whether its value was compared by identity.
    """

    space: dict[Any, Any]
    name: Any
    place: Place
    running: dict[Any, Any] | None = None
    exact: bool = False

    def read(self, run: bool = False) -> Any:
        return (self.space if self.running is None or not run else self.running).get(self.name, ABSENT)

    def same(self, now: Any, then: Any) -> bool:
        return now is then if self.exact and not _is_constant(then) else alike(now, then)

    def write(self, value: Any) -> None:
        if self.running is not None:
            return
        if value is ABSENT:
            self.space.pop(self.name, None)
        else:
            self.space[self.name] = value


@dataclass(eq=False)
class ClassName:
    """A name in a class and its bases."""

    kind: type
    name: str
    place: Place

    def read(self, run: bool = False) -> Any:
        return class_entry(self.kind, self.name)

    def same(self, now: Any, then: Any) -> bool:
        return alike(now, then)

    def write(self, value: Any) -> None:
        if value is ABSENT:
            delattr(self.kind, self.name)
        elif self.name in vars(self.kind) or all(self.name not in vars(base) for base in self.kind.__mro__):
            setattr(self.kind, self.name, value)


@dataclass(eq=False)
class Slot:
    """An attribute that lies in no dictionary: a slot, a field of an object of C's, what a thread has for its own."""

    value: Any
    name: str
    place: Place

    def read(self, run: bool = False) -> Any:
        return slot_of(self.value, self.name)

    def same(self, now: Any, then: Any) -> bool:
        return alike(now, then)

    def write(self, value: Any) -> None:
        if value is not ABSENT:
            setattr(self.value, self.name, value)
        elif self.read() is not ABSENT:
            delattr(self.value, self.name)


@dataclass(eq=False)
class Cell:
    """A variable of an enclosing function; ``running``: as of :class:`Name`."""

    cell: CellType
    place: Place
    running: CellType | None = None

    def read(self, run: bool = False) -> Any:
        try:
            return (self.cell if self.running is None or not run else self.running).cell_contents
        except ValueError:
            return ABSENT

    def same(self, now: Any, then: Any) -> bool:
        return alike(now, then)

    def write(self, value: Any) -> None:
        if value is not ABSENT and self.running is None:
            self.cell.cell_contents = value


@dataclass(eq=False)
class Contents:
    """What a container, an array or another object of C's holds."""

    value: Any
    place: Place
    running: Any = None
    _reader: Callable[[Any], Any] | None = field(default=None, repr=False)
    _but: Collection[Any] = ()

    def __post_init__(self) -> None:
        self._reader = contents_of(self.value)

    def without(self, keys: Collection[Any]) -> Contents:
        """The same of a dictionary, whatever it holds under these keys."""
        return replace(self, _but=keys)

    def read(self, run: bool = False) -> Any:
        if self._but:
            return [pair for pair in self._reader(self.value) if pair[0] not in self._but]
        return self._reader(self.value if self.running is None or not run else self.running)

    def same(self, now: Any, then: Any) -> bool:
        if type(now) is list and type(then) is list:
            return len(now) == len(then) and (all(map(is_, now, then)) or all(map(_same_entry, now, then)))
        return bool(now == then)

    def write(self, value: Any) -> None:
        if self.running is None:
            put_back(self.value, value)


@dataclass(eq=False)
class Class:
    """The class of an object, whose attributes were looked up."""

    value: Any
    place: Place

    def read(self, run: bool = False) -> Any:
        return type(self.value)

    def same(self, now: Any, then: Any) -> bool:
        return now is then

    def write(self, value: Any) -> None:
        self.value.__class__ = value


@dataclass(eq=False)
class Code:
    """The code of a function, and its default arguments where it ran."""

    function: FunctionType
    place: Place

    def read(self, run: bool = False) -> Any:
        function = self.function
        return function.__code__, function.__defaults__, function.__kwdefaults__

    def same(self, now: Any, then: Any) -> bool:
        return now[0] is then[0] and alike(now[1], then[1]) and alike(now[2], then[2])

    def write(self, value: Any) -> None:
        self.function.__code__, self.function.__defaults__, self.function.__kwdefaults__ = value


@dataclass(eq=False)
class Answer:
    """What a function in C tells of hidden state: it is called again."""

    function: Callable[..., Any]
    args: tuple
    kwargs: dict[str, Any]
    place: Place

    def read(self, run: bool = False) -> Any:
        return answer_of(self.function, self.args, self.kwargs)

    def same(self, now: Any, then: Any) -> bool:
        if same(now, then):
            return True
        if type(now) is list and type(then) is list:
            return len(now) == len(then) and all(map(self.same, now, then))
        plain = is_a(now, str | int | float | tuple | dict | bytes) and type(now) is type(then)
        return plain and bool(now == then)

    def write(self, value: Any) -> None:
        """Hidden state is not put back."""


def class_entry(kind: type, name: str) -> Any:
    """What a class or its bases hold under a name, as it is stored."""
    for base in kind.__mro__:
        held = base.__dict__
        if name in held:
            return held[name]
    return ABSENT


def slot_of(value: Any, name: str) -> Any:
    """The value of an attribute that lies in no dictionary; ``ABSENT``: there is none."""
    try:
        if is_a(value, _LOCAL):
            return _LOCAL.__getattribute__(value, name)
        raw = class_entry(type(value), name)
        return ABSENT if raw is ABSENT else raw.__get__(value)
    except AttributeError:
        return ABSENT


def _is_constant(value: Any) -> bool:
    return is_a(value, int | float | str | bytes | type(None)) or value is ABSENT


def _same_entry(now: Any, then: Any) -> bool:
    if type(now) is tuple and type(then) is tuple:
        return len(now) == len(then) and all(map(same, now, then))
    return same(now, then)


_IDENTITIES = (torch.Tensor, nn.Module, type, types.ModuleType, FunctionType, types.MethodType)


def alike(now: Any, then: Any, deep: int = 8) -> bool:
    """Whether a value means the same: it is the same, equal plain data, or an object whose fields all are alike."""
    if same(now, then):
        return True
    if type(now) is not type(then) or now is ABSENT or not deep or is_a(now, _IDENTITIES):
        return False
    if is_a(now, list | tuple | deque):
        return len(now) == len(then) and all(alike(a, b, deep - 1) for a, b in zip(now, then, strict=True))
    if is_a(now, dict):
        return list(now) == list(then) and all(alike(now[name], then[name], deep - 1) for name in now)
    if is_a(now, set | frozenset):
        return now == then and all(map(_is_constant, now))
    if contents_of(now) is not None or not hasattr(now, "__dict__") or type(now).__module__ == "builtins":
        return False
    return type(vars(now)) is dict and alike(vars(now), vars(then), deep - 1)
