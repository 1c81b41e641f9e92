"""Watched places: a place that forward read → its present value, a comparison with an earlier one, and a restore.

The same objects serve a run (its changes) and a guard (whether a call reads the same).
"""

from __future__ import annotations

import gc
import threading
import types
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from operator import is_
from types import CellType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn

from bridge.base.errors import MODULE, GuardFailure
from bridge.guards.kinds import CONTAINERS, PLAIN, answer_of, contents_of, is_a, is_told, put_back
from bridge.guards.objects import ABSENT, class_entry, dict_of, is_changeable
from bridge.state import kept, same

__all__ = ["ABSENT", "MANY", "Answer", "CachedResult", "Class", "ClassName", "ClosureCell", "Code", "Contents"]
__all__ += ["Name", "Place", "Slot", "Watched", "alike", "class_entry", "contents_at", "entry_of", "nested"]
__all__ += ["slot_of", "slots_in", "table_of"]

_LOCAL = threading.local
MANY = 64
"""The limit of entries that are followed one by one."""
_REFILLED: dict[int, weakref.ref] = {}
"""Sets that were restored: another order of the same entries does not matter."""
_TABLES = {list: iter, tuple: iter, set: iter, frozenset: iter, dict: lambda held: chain.from_iterable(held.items())}


class Place(NamedTuple):
    """The name of a place.

    Attributes:
        kind, text, of: as in ``attribute 'scale' of the module``, ``global 'cfg.scale'``.
        root: its name in a refusal: ``self.cfg``, ``global 'cfg'``.
    """

    kind: str
    text: str
    of: str = ""
    root: str = ""

    def then(self, more: str) -> Place:
        """The place of an object inside; inside of a module's attribute it is that attribute."""
        return self if self.root else Place(self.kind or "attribute", self.text + more, self.of)

    def __str__(self) -> str:
        return f"{self.kind} '{self.text}'{self.of}" if self.kind else self.text

    @property
    def changed(self) -> str:
        return self.root or str(self)


class Watched:
    """A place: its value, whether the value means the same as an earlier one, and its restore."""

    place: Place

    def read(self, run: bool = False) -> Any:
        """Its present value; ``run``: in the run's own copy, if there is one."""
        raise NotImplementedError

    def same(self, now: Any, then: Any) -> bool:
        return alike(now, then)

    def differs(self, then: Any, run: bool = False) -> bool:
        """Whether its value differs from ``then``."""
        now = self.read(run)
        return now is not then and not self.same(now, then)

    def failures(self, then: Any) -> Iterator[GuardFailure]:
        """The reasons of a miss, where its value differs from ``then``."""
        yield GuardFailure(MODULE, f"{self.place} changed")

    def write(self, value: Any) -> None:
        """Restores a value, where possible."""


@dataclass(eq=False)
class Name(Watched):
    """A name in a namespace (a file's, an object's, a dictionary's key), or its absence.

    Attributes:
        space: the dictionary. ``running``: its copy in the run, if there is one.
        exact: whether its value was compared by identity.
    """

    space: Mapping[Any, Any]
    name: Any
    place: Place
    running: dict[Any, Any] | None = None
    exact: bool = False

    def read(self, run: bool = False) -> Any:
        return entry_of(self.space if self.running is None or not run else self.running, self.name)

    def same(self, now: Any, then: Any) -> bool:
        return now is then if self.exact else alike(now, then)

    def write(self, value: Any) -> None:
        if self.running is not None or not is_a(self.space, dict):
            return
        if value is ABSENT:
            self.space.pop(self.name, None)
        else:
            self.space[self.name] = value


@dataclass(eq=False)
class ClassName(Watched):
    """A name in a class and its bases."""

    kind: type
    name: str
    place: Place
    _homes: dict[int, type] = field(default_factory=dict, repr=False)

    def read(self, run: bool = False) -> Any:
        value = class_entry(self.kind, self.name)
        if value is not ABSENT:
            self._homes[id(value)] = next(base for base in self.kind.__mro__ if self.name in vars(base))
        return value

    def write(self, value: Any) -> None:
        """Restores the entry in its class; deletes entries of derived classes that hide it."""
        now = (base for base in self.kind.__mro__ if self.name in vars(base))
        home = None if value is ABSENT else self._homes.get(id(value)) or next(now, self.kind)
        for base in self.kind.__mro__:
            if base is home:
                break
            if self.name in vars(base):
                delattr(base, self.name)
        if home is not None and vars(home).get(self.name, ABSENT) is not value:
            setattr(home, self.name, value)


@dataclass(eq=False)
class Slot(Watched):
    """An attribute outside of a dictionary: a slot, a field of a C object, an attribute of a ``threading.local``."""

    value: Any
    name: str
    place: Place

    @property
    def get(self) -> Any:
        """The slot's descriptor, a fast reader while the object's class stays the same; ``None``: there is none."""
        raw = ABSENT if is_a(self.value, _LOCAL) else class_entry(type(self.value), self.name)
        return raw if is_a(raw, types.MemberDescriptorType) else None

    def read(self, run: bool = False) -> Any:
        return slot_of(self.value, self.name)

    def write(self, value: Any) -> None:
        with suppress(AttributeError, TypeError):  # read-only from Python
            if value is not ABSENT:
                setattr(self.value, self.name, value)
            elif self.read() is not ABSENT:
                delattr(self.value, self.name)


@dataclass(eq=False)
class ClosureCell(Watched):
    """A variable of an enclosing function; ``running``: see :class:`Name`."""

    cell: CellType
    place: Place
    running: CellType | None = None

    def read(self, run: bool = False) -> Any:
        try:
            return (self.cell if self.running is None or not run else self.running).cell_contents
        except ValueError:
            return ABSENT

    def write(self, value: Any) -> None:
        if self.running is not None:
            return
        if value is not ABSENT:
            self.cell.cell_contents = value
        elif self.read() is not ABSENT:
            del self.cell.cell_contents


@dataclass(eq=False)
class Contents(Watched):
    """The contents of a container, an array or another C object; ``table``: including nested containers."""

    value: Any
    place: Place
    running: Any = None
    table: bool = False
    _reader: Callable[[Any], Any] | None = field(default=None, repr=False)
    _but: Collection[Any] = ()

    def __post_init__(self) -> None:
        self._reader = table_of if self.table else contents_of(self.value)

    def without(self, keys: Collection[Any]) -> Contents:
        """The contents of a dictionary without these keys."""
        return replace(self, table=False, _but=keys)

    def read(self, run: bool = False) -> Any:
        if self._but:
            return [pair for pair in self._reader(self.value) if pair[0] not in self._but]
        return self._reader(self.value if self.running is None or not run else self.running)

    def same(self, now: Any, then: Any) -> bool:
        if self.table and now is not None and len(now) == len(then) and all(map(is_, now, then)):
            return True
        if id(self.value) in _REFILLED and len(now) == len(then):
            then = [dict(zip(then, then, strict=True)).get(each, ABSENT) for each in now]
        return alike(now, then)

    def write(self, value: Any) -> None:
        if self.running is None:
            if is_a(self.value, set) and not self.table:
                gone = partial(_REFILLED.pop, id(self.value))
                _REFILLED[id(self.value)] = weakref.ref(self.value, gone)
            (write_table if self.table else put_back)(self.value, value)


class Class(Watched):
    """The class of an object whose attributes were looked up, and its dictionary; the object is not kept alive."""

    def __init__(self, value: Any, place: Place):
        self.place = place
        try:
            self.value: Callable[[], Any] = weakref.ref(value)
        except TypeError:
            self.value = lambda: value

    def read(self, run: bool = False) -> Any:
        value = self.value()
        return None if value is None else (type(value), dict_of(value))

    def same(self, now: Any, then: Any) -> bool:
        """True for an object that is gone: no call can meet it."""
        return now is None or then is None or (now[0] is then[0] and now[1] is then[1])

    def write(self, value: Any) -> None:
        owner = self.value()
        if owner is None or value is None:
            return
        kind, held = value
        if type(owner) is not kind:
            owner.__class__ = kind
        if dict_of(owner) is not held:
            owner.__dict__ = held


@dataclass(eq=False)
class Code(Watched):
    """The code of a function, and its default arguments where it ran."""

    function: FunctionType
    place: Place

    def read(self, run: bool = False) -> Any:
        function = self.function
        return function.__code__, function.__defaults__, function.__kwdefaults__

    def same(self, now: Any, then: Any) -> bool:
        return now[0] is then[0] and alike(now[1], then[1]) and alike(now[2], then[2])

    def failures(self, then: Any) -> Iterator[GuardFailure]:
        is_same_code = self.function.__code__ is then[0]
        told = f"default arguments of {self.function.__qualname__}" if is_same_code else self.place
        yield GuardFailure(MODULE, f"{told} changed")

    def write(self, value: Any) -> None:
        self.function.__code__, self.function.__defaults__, self.function.__kwdefaults__ = value


@dataclass(eq=False)
class Answer(Watched):
    """The result of a function in C that returns hidden state; it is called again, not restored."""

    function: Callable[..., Any]
    args: tuple
    kwargs: dict[str, Any]
    place: Place

    def read(self, run: bool = False) -> Any:
        return answer_of(self.function, self.args, self.kwargs)


def contents_at(place: Watched) -> Any:
    """Deep snapshot of a container that forward makes anew, which shows the caller's changes."""
    return nested(place.read())


def nested(value: Any) -> Any:
    """A container → nested lists of types and contents; any other object itself."""
    held = (contents_of(value) or tuple.__iter__) if is_a(value, CONTAINERS) else None
    return value if held is None else [type(value), *map(nested, held(value))]


class CachedResult(Watched):
    """The result that ``lru_cache`` keeps for some arguments: looked up without a call, which would fill the cache.

    Attributes:
        made: the result of a run, while the cache has none. ``free``: each call makes its own.
    """

    def __init__(self, function: Any, args: tuple, kwargs: dict[str, Any], place: Place):
        self._call, self.place = partial(function, *args, **kwargs), place
        self.made, self.free, self._found = ABSENT, False, (ABSENT, ABSENT)
        inside = gc.get_referents(function)
        tables = [each for each in inside if type(each) is dict and each is not function.__dict__]
        self._cache = tables[-1]  # the results come last; other dictionaries may come before them
        typed = function.cache_parameters()["typed"]
        types_of = tuple(map(type, (*args, *kwargs.values()))) if typed else ()
        words = tuple(part for pair in kwargs.items() for part in pair)
        marks = [(each,) for each in inside if type(each) is object] if words else [()]
        alone = len(args) == 1 and not words and not typed and type(args[0]) in (int, str)
        self._keys = [args[0]] if alone else [(*args, *mark, *words, *types_of) for mark in marks]

    def read(self, run: bool = False) -> Any:
        if self.free:
            return ABSENT
        held = next((self._cache[key] for key in self._keys if key in self._cache), ABSENT)
        if held is ABSENT:
            return self.made
        if type(held).__name__ != "_lru_list_elem":
            return held
        known = held, self._call.func.cache_info().misses  # a full cache keeps its next result in an old element
        if known != self._found[0]:
            self._found = known, self._call()
        return self._found[1]


def table_of(value: Any) -> list[Any] | None:
    """The contents of a container of many plain values, nested or not: sizes and entries of each container in one list.

    ``None`` for any other object.
    """
    if type(value) not in _TABLES or len(value) <= MANY:
        return None
    found: list[Any] = []
    for _, held in _containers(value, lambda each: [*_TABLES[type(each)](each)]) or ():
        found.append(len(held))
        found += held
    return found or None


def _containers(value: Any, entries: Callable[[Any], list[Any]]) -> list[tuple[Any, list[Any]]] | None:
    """A container and those nested in it, each once, with its entries; ``None`` if one holds any other object."""
    found, waiting, seen = [], [value], {id(value)}
    for each in waiting:
        held = entries(each)
        for part in held:
            if type(part) in PLAIN or id(part) in seen:
                continue
            if type(part) not in _TABLES:
                return None
            seen.add(id(part))
            waiting.append(part)
        found.append((each, held))
    return found


def write_table(value: Any, contents: list[Any]) -> None:
    """Restores a container and its nested containers from the result of :func:`table_of`."""
    rest = iter(contents)
    for each, held in _containers(value, lambda _: [*islice(rest, next(rest))]) or ():
        put_back(each, list(zip(held[::2], held[1::2], strict=True)) if type(each) is dict else held)


def entry_of(space: Mapping[Any, Any], name: Any) -> Any:
    """An entry of a dictionary, or of a view of one, as it is stored."""
    return (dict.get if is_a(space, dict) else type(space).get)(space, name, ABSENT)


def slot_of(value: Any, name: str) -> Any:
    """The value of an attribute outside of a dictionary; ``ABSENT``: there is none."""
    try:
        if is_a(value, _LOCAL):
            return _LOCAL.__getattribute__(value, name)
        raw = class_entry(type(value), name)
        return ABSENT if raw is ABSENT else raw.__get__(value)
    except AttributeError:
        return ABSENT


_IDENTITIES = (torch.Tensor, nn.Module, type, types.ModuleType, FunctionType, types.MethodType)
_IDENTITIES += (int, float, complex, str, bytes)


def alike(now: Any, then: Any, deep: int = 8) -> bool:
    """Whether two values mean the same: one object, equal plain data, or objects whose fields are all alike."""
    if same(now, then):
        return True
    if type(now) is not type(then) or now is ABSENT or not deep or is_a(now, _IDENTITIES):
        return False
    if type(now) in (list, tuple, set):
        now, then = kept(now), kept(then)
        return len(now) == len(then) and all(alike(a, b, deep - 1) for a, b in zip(now, then, strict=True))
    if is_told(type(now)):
        return repr(now) == repr(then)
    held = kept if is_a(now, tuple) else contents_of(now)
    if held is not None and not alike(held(now), held(then), deep - 1):
        return False
    own, slots = dict_of(now), slots_in(type(now))
    if type(now).__module__ == "builtins" or (own is None and not slots):
        return held is not None
    if any(not alike(slot_of(now, name), slot_of(then, name), deep - 1) for name in slots):
        return False
    return own is None or (type(own) is dict and alike(list(own.items()), list(dict_of(then).items()), deep - 1))


def slots_in(kind: type) -> list[str]:
    """The slots of a class whose bases are all Python classes."""
    if not all(map(is_changeable, kind.__mro__[:-1])):
        return []
    bases = [vars(base) for base in kind.__mro__ if "__slots__" in vars(base)]
    return [name for held in bases for name, raw in held.items() if is_a(raw, types.MemberDescriptorType)]
