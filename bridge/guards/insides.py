"""Insides of objects: a container or other object → its entries as places, noted one by one or as a whole."""

from __future__ import annotations

import operator
import threading
import types
from collections import defaultdict
from collections.abc import Iterable, Sequence
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from bridge.guards.kinds import CONTAINERS, PLAIN, contents_of, is_a, is_iterator, is_key, parts_of
from bridge.guards.objects import ANY, Instance, dict_of, fields_of, interesting, is_library, names_of
from bridge.guards.watched import ABSENT, MANY, Contents, Place, slot_of, slots_in, table_of
from bridge.guards.world import World

__all__ = ["Insides"]

_DEEP = 5
"""Levels of objects inside of each other."""


class Insides(World):
    """Contents analysis: reads of containers and other objects → watched places of their entries.

    Attributes:
        writes: how often contents may have been written.
        raised: exceptions that forward raised, by identity.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._followed, self.writes = set[tuple](), 0
        self._tables: dict[tuple[int, int], bool] = {}
        self._insides: dict[tuple[int, int, int], tuple[Any, list[Any]]] = {}
        self.raised: dict[Any, Any] = {}
        super().__init__(*args, **kwargs)

    def forget(self) -> None:
        super().forget()
        self._tables.clear()
        self._insides.clear()
        self.raised.clear()

    def entry(self, owner: Any, key: Any) -> list[Any]:
        """An entry of a container by its key."""
        if is_a(owner, Instance):
            return []
        if not self.knows(owner):
            self.strangers.note(owner, ("entry", key) if key is not ANY and is_key(key) else ("whole", ""))
            return self.inside(owner, 1)
        if type(owner) in (set, frozenset) and key is not ANY and is_key(key):
            self._class(owner)
            place = self.place(owner).then(f" with {key!r:.80}")
            self.ask(operator.contains, (self.original(owner), key), {}, str(place))
            return []
        if is_a(owner, dict | types.MappingProxyType) and key is not ANY and is_key(key):
            self._class(owner)
            own = self.original(owner)
            return interesting(
                self.name(own, key, self.place(owner).then(f"[{key!r}]"), None if own is owner else owner)
            )
        self.whole(owner)
        return self.inside(owner, 1)

    def member(self, owner: Any, keys: Iterable[Any], where: str) -> None:
        """Notes whether a container has some keys, or one of its elements equals one of them."""
        for key in keys:
            if is_a(owner, dict | types.MappingProxyType | set | frozenset):
                self.entry(owner, key)
            else:
                self.whole(owner, where, compared=True)

    def is_table(self, value: Any) -> bool:
        """Whether an object is a container of many plain values: one place, with nothing inside to follow."""
        if type(value) not in CONTAINERS or len(value) <= MANY:
            return False
        key = id(value), len(value)
        if key not in self._tables:
            self._tables[key] = table_of(value) is not None
        return self._tables[key]

    def inside(self, owner: Any, deep: int) -> list[Any]:
        """The entries of a container, and of those ``deep - 1`` levels inside."""
        if self.is_table(owner):
            return []
        known, place, found = self.knows(owner), self.place(owner), []
        key = None
        if known and type(owner) in CONTAINERS:
            key = (id(owner), deep, len(owner)) if len(owner) > MANY else None
        elif known and contents_of(owner) is not None and not is_iterator(owner):  # its reader may make new objects
            key = id(owner), deep, 0
        if key in self._insides:
            return self._insides[key][1]
        for value in parts_of(owner):
            if known:
                self.know(value, place)
            found.append(value)
            if deep > 1:
                found += self.inside(value, deep - 1)
        if key is not None:
            self._insides[key] = owner, found
        return found

    def may_be_written(self) -> None:
        """Forgets followed objects, whose contents may have been written."""
        self.writes += 1
        self._followed.clear()
        self._insides.clear()

    def identity_of_passed(self, value: Any, where: str, among: Sequence[Any] | None = None) -> None:
        """Refuses a read of an argument's identity or address; ``among``: the arguments, :attr:`passed` by default."""
        if any(value is each for each in (self.passed if among is None else among)):
            reason = "forward asks which object it is given; a compiled call makes another one of the same contents"
            self.refuse(f"a {type(value).__name__}", where, reason, "compare what is in it")

    def whole(self, value: Any, where: str = "forward", compared: bool = False) -> None:
        """Notes a read of an object's contents; ``compared``: with other contents, or shown as text."""
        if compared and type(value).__repr__ in (object.__repr__, FunctionType.__repr__):
            self.identity_of_passed(value, where)
        if not self.knows(value):
            return self.strangers.note(value, ("whole", where))
        if is_a(value, torch.Tensor):
            return self.look_at(value)
        if is_a(value, type) and not is_library(type(value)):
            self.special_methods(type(value))
        for name in ("__qualname__", "__module__") if compared and is_a(value, type) else ():
            self.attribute(value, name)
        if is_a(value, nn.Module | type | ModuleType | FunctionType):
            return
        own = self.original(value)
        self._class(value)
        if ("contents", id(own)) in self.items and not compared:
            self._note(("contents", id(own)), None)
            return
        if is_a(value, defaultdict):
            self._slot(value, "default_factory", self.place(value))
        if is_a(value, types.BuiltinMethodType | types.MethodWrapperType):
            self.whole(value.__self__, where)
        elif is_a(value, tuple):
            for each in self.inside(value, 1):
                self.whole(each, where, compared)
        elif contents_of(own) is not None:
            running, is_table = None if own is value else value, self.is_table(own)
            self._note(("contents", id(own)), Contents(own, self.place(value), running, is_table))
            for each in self.inside(value, 1):
                if is_a(each, CONTAINERS) or (compared and is_a(each, types.SimpleNamespace)):
                    self.whole(each, where, compared)
        elif compared and is_a(value, types.SimpleNamespace):
            self.all(value)
            for each in dict_of(value).values():
                self.whole(each, where, compared)
        else:
            self.refuse_unwatched(value, str(self.place(value)), where)

    def deep(self, value: Any, levels: int = _DEEP) -> None:
        """Notes reads of everything inside an object."""
        if type(value) in PLAIN or value is ABSENT or not levels:
            return
        if not self.knows(value):
            of = value.kind if is_a(value, Instance) else type(value)
            for kind in of.__mro__ if levels == _DEEP and not issubclass(of, nn.Module | torch.Tensor) else ():
                if not (kind in PLAIN or is_library(kind)):  # its entries show in the object
                    self.know(kind, Place("class", kind.__name__))
                    self.all(kind)
            return self.strangers.note(value, ("deep",))
        self.whole(value)
        for name in value.__code__.co_names if is_a(value, FunctionType) else ():
            self.name(value.__globals__, name, Place("global", name))
        for name in ("__annotations__", "__dict__") if is_a(value, FunctionType) else ():
            for each in self.attribute(value, name):
                self.whole(each)
        if is_a(value, torch.Tensor | nn.Module | ModuleType | FunctionType):
            return
        if not is_a(value, CONTAINERS):
            self.all(value)
        of_class = [each for each in vars(value).values() if is_a(each, CONTAINERS)] if is_a(value, type) else []
        for each in of_class:
            self.know(each, self.place(value))
        slots = (slot_of(value, name) for name in slots_in(type(value)))
        held = (*self.inside(value, 1), *(dict_of(value) or {}).values(), *slots)
        for each in of_class if is_a(value, type) else held:
            self.deep(each, levels - 1)

    def any_attribute(self, owner: Any) -> list[Any]:
        """The values of all attributes of an object, one of which is read by a computed name."""
        self.all(owner)
        if is_a(owner, threading.local):
            self.whole(*self.attribute(owner, "__dict__"))
        of_class = [value for each in fields_of(owner) for value in self.attribute(owner, each)]
        held = owner.__dict__ if is_a(owner, threading.local) else dict_of(owner) or {}
        for value in held.values() if self.knows(owner) else ():
            self.know(value, self.place(owner))
        return [*held.values(), *of_class]

    def moved(self, value: Any, where: str) -> None:
        """Refuses an iterator's advance."""
        if self.knows(value) and is_iterator(value):
            reason = "takes the next value of an iterator that lies outside of the call; a compiled call takes none"
            self.refuse(str(self.place(value)) or type(value).__name__, where, reason, "pass the value to forward")

    def all(self, owner: Any) -> None:
        """Notes reads of all attributes of an object."""
        if not self.knows(owner):
            return self.strangers.note(owner, ("all",))
        kind = owner if is_a(owner, type) else type(owner)
        if not is_library(kind) and not issubclass(kind, nn.Module | torch.Tensor):
            self.ask(names_of, (kind,), {}, f"names in class {kind.__name__}")
        if (place := self.inputs.get(id(owner))) is not None:
            self.tensors.asked.setdefault((place, "__dict__"))
        if is_a(owner, nn.Module):
            self._looked_up(self.original(owner), "*")
        elif (held := vars(owner) if is_a(owner, type | ModuleType) else dict_of(self.original(owner))) is not None:
            for name in () if is_a(owner, type | ModuleType) else list(held):
                self.attribute(owner, name)
            self._note(("contents", id(held)), Contents(held, self.place(owner)))
        for name in slots_in(type(owner)):
            self.attribute(owner, name)
