"""Plain Python attributes of a module, remembered: numbers, lists, configuration objects decide what forward does.

An attribute is first compared by identity, which costs a few nanoseconds and settles almost every call. What is
mutable (a list, a dict, a set, the fields of a configuration object) is also compared by contents, containers within
containers included; each is looked at once, however many submodules refer to it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from operator import is_
from types import ModuleType
from typing import Any

import torch
from torch import nn

__all__ = ["Contents", "contents_of", "same_plain"]

_PLAIN = (bool, int, float, complex, str, bytes, tuple, frozenset, type(None))
_PLAIN += (torch.dtype, torch.device, torch.memory_format, torch.layout)
#: How deep a configuration object may lie inside another one.
_NESTED_OBJECTS = 2


class Contents:
    """The contents of a mutable object as they were.

    Attributes:
        place: what leads to the object, for the reason of a mismatch.
    """

    __slots__ = ("_keys", "_read", "_values", "_view", "place")

    def __init__(self, place: Any, value: Any):
        self.place = place
        self._view = value if type(value) in (list, set, dict) else vars(value)
        is_mapping = isinstance(self._view, dict)
        self._read: Callable[[], Any] = self._view.values if is_mapping else self._view.__iter__
        self._keys = list(self._view) if is_mapping else None
        self._values = list(self._read())

    def unchanged(self) -> bool:
        """Whether the object still holds the same objects, or plain values that are equal."""
        view = self._view
        if len(view) != len(self._values) or (self._keys is not None and list(view) != self._keys):
            return False
        if type(view) is set:
            return view == set(self._values)
        return all(map(is_, self._read(), self._values)) or all(map(same_plain, self._read(), self._values))


def same_plain(now: Any, then: Any) -> bool:
    """Whether this is the same object, or a value of the same type that no operator can tell apart.

    A list in the place of an equal one counts as the same: what was remembered is watched by contents of its own.
    """
    if now is then:
        return True
    if type(now) is not type(then):
        return False
    if type(now) is list or isinstance(now, tuple):
        return len(now) == len(then) and all(map(same_plain, now, then))
    if not isinstance(now, _PLAIN):
        return False
    if isinstance(now, float | complex):  # zero has a sign, and nan is nan
        return repr(now) == repr(then)
    return bool(now == then)


def contents_of(place: Any, value: Any, seen: dict[int, Any]) -> Iterator[Contents]:
    """The mutable objects that an attribute's value holds, each once; ``seen`` keeps those visited, by identity."""
    yield from _walk(place, value, seen, _NESTED_OBJECTS)


def _walk(place: Any, value: Any, seen: dict[int, Any], objects: int) -> Iterator[Contents]:
    kind = type(value)
    if kind in (tuple, list, set, dict):
        parts = list(value.values() if kind is dict else value)
    elif objects and _is_configuration(value):
        parts, objects = list(vars(value).values()), objects - 1
    else:
        return
    if id(value) in seen:
        return
    seen[id(value)] = value
    if kind is not tuple:
        yield Contents(place, value)
    for part in parts:
        yield from _walk(place, part, seen, objects)


def _is_configuration(value: Any) -> bool:
    """An object whose fields decide what forward does: not a module, a function, a type or a logger."""
    excluded = (nn.Module, torch.Tensor, type, ModuleType, logging.Logger)
    return hasattr(value, "__dict__") and not isinstance(value, excluded) and not callable(value)
