"""Reachable values: a module's plain attributes → contents of all that can be reached from them, as they were.

An attribute is first compared by identity, which costs a few nanoseconds and settles almost every call. What is
mutable (a list, a dict, a set, an array, the fields of a configuration object) is also compared by contents,
containers within containers included; each is looked at once, however many submodules refer to it.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator
from copy import copy
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from bridge.base.torch_internals import OPERATOR_MODULES
from bridge.state.attribute_reads import AttributeReads
from bridge.state.generators import is_moved
from bridge.state.module import own_attributes
from bridge.state.values import PLAIN, kept, kind_of_container, same

__all__ = ["Contents", "Fields", "Reached", "is_installed"]

#: How deep a configuration object may lie inside others: ``cfg.model.encoder.attention.scale`` is four deep.
_NESTED_OBJECTS = 5
_ABSENT = object()
_OPERATORS = (*OPERATOR_MODULES, "triton.")
"""Modules of classes whose objects are operators and kernels: called as they are then, by eager and compiled code
alike. What they hold besides (tables of tracers' kernels, compiled code) leads anywhere, and changes with calls."""
_NOT_CONFIGURATION = (torch.Tensor, type, ModuleType, logging.Logger, BuiltinFunctionType, nn.Module)


class Contents:
    """The contents of a mutable object as they were.

    Attributes:
        place: what leads to the object, for the reason of a guard failure.
    """

    __slots__ = ("_keys", "_read", "_values", "_view", "place")

    def __init__(self, place: Any, view: Any):
        self.place = place
        self._view = view
        self._read: Callable[[], Any] = _iteration(view)
        self._keys = [*dict.keys(view)] if isinstance(view, dict) else None
        self._values = list(self._read())

    @property
    def values(self) -> list[Any]:
        """What it held."""
        return list(self._values)

    @property
    def counted(self) -> dict[str, Any] | None:
        """The dictionary behind it, if the count of writes to that tells whether anything was changed."""
        return self._view if type(self._view) is dict else None

    @property
    def held_list(self) -> list[Any] | None:
        """The object, if it is a list and of no class of its own."""
        return self._view if type(self._view) is list else None

    def unchanged(self) -> bool:
        """Whether the object still holds the same objects, or plain values that are equal."""
        view, now = self._view, [*self._read()]
        if len(now) != len(self._values) or (self._keys is not None and [*dict.keys(view)] != self._keys):
            return False
        if isinstance(view, set):
            return set.__eq__(view, set(self._values))
        return all(map(is_, now, self._values)) or all(map(same, now, self._values))

    def again(self) -> Contents:
        """The contents of the same object as they are now."""
        found = copy(self)
        found._keys = None if self._keys is None else [*dict.keys(self._view)]
        found._values = [*self._read()]
        return found

    def restore(self) -> None:
        """Puts back what was there; never empties it first, since another thread may be looking."""
        view, values = self._view, self._values
        if self.unchanged():
            return
        kind = kind_of_container(view)
        if isinstance(view, dict):
            for key in {*dict.keys(view)} - {*self._keys}:
                kind.__delitem__(view, key)
            for key, value in zip(self._keys, values, strict=True):
                kind.__setitem__(view, key, value)
        elif isinstance(view, list):
            list.__setitem__(view, slice(None), values)
        elif isinstance(view, set):
            view &= set(values)
            view |= set(values)
        elif isinstance(view, deque):
            view.clear()
            view.extend(values)
        elif view.write is not None:
            view.write(values)


class Chosen(NamedTuple):
    """The attributes of an object, ``fields``, of which those of some names count, there or not."""

    fields: dict[str, Any]
    names: tuple[str, ...]

    def values(self) -> list[Any]:
        return [self.fields.get(name, _ABSENT) for name in self.names]


class ChosenContents(Contents):
    """Those attributes as they were; others may come, go and change."""

    __slots__ = ()

    def __init__(self, place: Any, chosen: Chosen):
        self.place, self._view, self._keys, self._read = place, chosen.fields, None, chosen.values
        self._values = chosen.values()

    def unchanged(self) -> bool:
        now = self._read()
        return all(map(is_, now, self._values)) or all(map(same, now, self._values))


def _contents(place: Any, view: Any) -> Contents:
    return ChosenContents(place, view) if isinstance(view, Chosen) else Contents(place, view)


def _iteration(view: Any) -> Callable[[], Any]:
    """What goes through the values of a container as it is stored, whatever a subclass makes of it."""
    kind = kind_of_container(view)
    if kind is None:
        return view.__iter__
    return partial(kind.values if issubclass(kind, dict) else kind.__iter__, view)


class Fields:
    """The values behind a function of an object, seen as a container: slots, an array's bytes, a module's settings.

    ``write`` puts such values back.
    """

    def __init__(self, read: Callable[[Any], list[Any]], owner: Any, write: Callable[[list[Any]], None] | None = None):
        self._values_of, self._owner = read, owner
        self.write = write

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values_of(self._owner))

    def __len__(self) -> int:
        return len(self._values_of(self._owner))


def is_installed(thing: Any) -> bool:
    """Whether a class, function or module is torch's, Python's or an installed package's, not the user's own."""
    name = thing.__name__ if isinstance(thing, ModuleType) else getattr(thing, "__module__", None) or "builtins"
    package = name.partition(".")[0]
    if package == "torch" or (package in sys.stdlib_module_names and package != "__main__"):
        return True
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file


@dataclass
class Reached:
    """What can be reached from attributes: mutable contents, functions, and classes of the user's.

    Attributes:
        registered: modules that are guarded elsewhere.
        reads: what was read of objects; ``None``: all of them.
        objects: those with a dictionary of attributes.
        contents: each mutable object once.
        moving: generators that are not torch's, and iterators, with what leads to each.
        functions, kinds: functions found (their closures and globals matter) and classes of the objects found.
    """

    registered: Collection[nn.Module] = ()
    reads: AttributeReads | None = None
    objects: list[Any] = field(default_factory=list)
    contents: list[Contents] = field(default_factory=list)
    moving: list[tuple[Any, Any]] = field(default_factory=list)
    functions: list[FunctionType] = field(default_factory=list)
    kinds: dict[type, None] = field(default_factory=dict)
    _seen: dict[int, Any] = field(default_factory=dict)

    def add(self, place: Any, value: Any) -> None:
        """Walks through ``value``; ``place`` is what its contents are remembered under."""
        self._walk(place, value, _NESTED_OBJECTS)

    def _walk(self, place: Any, value: Any, objects: int) -> None:
        if id(value) in self._seen or isinstance(value, Enum) or (type(value) in PLAIN and type(value) is not tuple):
            return
        self._seen[id(value)] = value
        if is_moved(value):
            self.moving.append((place, value))
            return
        views, parts = self._open(value, objects)
        self.contents += [_contents(place, view) for view in views]
        objects -= not isinstance(value, tuple | list | set | dict | deque)
        for part in parts:
            self._walk(place, part, objects)

    def _open(self, value: Any, objects: int) -> tuple[list[Any], list[Any]]:
        """What of ``value`` is to be remembered, and the values to look into in turn."""
        if isinstance(value, FunctionType):
            self.functions.append(value)
            return [], []
        if isinstance(value, type):
            if not is_installed(value):
                self.kinds[value] = None
            return [], []
        if isinstance(value, MethodType):
            return [], [value.__func__, value.__self__]
        if isinstance(value, BuiltinFunctionType) and isinstance(value.__self__, type):
            return [], [value.__self__]
        if isinstance(value, partial):
            return [], [value.func, *value.args, *value.keywords.values()]
        if isinstance(value, nn.Module):
            return self._open_module(value)
        if type(value).__module__.startswith(_OPERATORS):
            return [], []
        if type(value).__module__ == "numpy" and type(value).__name__ == "ndarray":
            return [Fields(_array, value, partial(_write_array, value))], []
        views, parts = [], []
        if isinstance(value, tuple | list | set | deque):
            parts = kept(value)
            views = [] if isinstance(value, tuple) else [value]
        elif isinstance(value, dict):
            parts, views = kept(value), [value]
        elif not objects or isinstance(value, _NOT_CONFIGURATION):
            return [], []
        fields = getattr(value, "__dict__", None)
        if isinstance(fields, dict) and fields is not value:
            self.objects.append(value)
            names = None if self.reads is None else self.reads.of(value)
            if names is None:
                views.append(fields)
                parts += fields.values()
            else:
                views.append(Chosen(fields, tuple(sorted(names))))
                parts += [fields[name] for name in names if name in fields]
        slots = _slots(type(value))
        if slots:
            read = partial(_slot_values, slots)
            views.append(Fields(read, value, partial(_write_slots, slots, value)))
            parts += read(value)
        if (views or parts) and not is_installed(type(value)):
            self.kinds[type(value)] = None
        return views, parts

    def _open_module(self, module: nn.Module) -> tuple[list[Any], list[Any]]:
        """A module that is not registered as a part: hidden in a list, or the parent of what is guarded."""
        if module in self.registered:
            return [], []
        if any(part in self.registered for part in module.modules()):
            return [Fields(_settings, module)], []
        self.kinds[type(module)] = None
        return [Fields(_settings, module)], [*_settings(module), *module.children()]


def _settings(module: nn.Module) -> list[Any]:
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return [module.training, *hooks, *(value for _, value in own_attributes(module))]


def _array(array: Any) -> list[Any]:
    numbers = array.tolist() if array.dtype.hasobject else array.tobytes()
    return [str(array.dtype), array.shape, numbers]


def _write_array(array: Any, values: list[Any]) -> None:
    _, shape, numbers = values
    if array.dtype.hasobject:
        array[...] = numbers
    else:
        array[...] = type(array)(shape, array.dtype, bytearray(numbers))


def _slots(kind: type) -> list[str]:
    """Names of the slots of the user's classes; libraries keep other things than settings there."""
    if is_installed(kind):
        return []
    found = [name for base in kind.__mro__ for name in _as_tuple(vars(base).get("__slots__", ()))]
    return [name for name in found if name not in ("__dict__", "__weakref__")]


def _as_tuple(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _slot_values(names: list[str], value: Any) -> list[Any]:
    return [getattr(value, name, None) for name in names]


def _write_slots(names: list[str], owner: Any, values: list[Any]) -> None:
    for name, value in zip(names, values, strict=True):
        setattr(owner, name, value)
