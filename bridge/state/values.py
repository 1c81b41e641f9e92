"""The same value: plain Python values compared, made into hashable keys, and copied to be compared later.

Exact in what an operator could tell apart: 1, 1.0 and True differ, so do 0.0 and -0.0, and nan is nan.

Python's and numpy's global random generators: whether a run moved them, and their states put back.
"""

from __future__ import annotations

import random
import sys
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bridge.base.threads import is_alone

__all__ = ["CONTAINERS", "PLAIN", "constant_key", "dict_of", "generators_put_back", "kept", "kind_of_container"]
__all__ += ["moved_generators", "same", "same_inside", "snapshot"]

_CONSTANTS = (bool, int, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
PLAIN = (*_CONSTANTS, float, complex, bytes, tuple, frozenset)
"""Types of immutable values, which are compared by value."""
CONTAINERS = (list, dict, OrderedDict, set)
"""Types of containers whose contents a snapshot has; a module's registries of hooks are ordered ones."""


def kind_of_container(value: Any) -> type | None:
    """The container of Python's that a value is, whose methods see what is stored; a class of its own may refuse."""
    kinds = (OrderedDict, dict, list, tuple, set, frozenset, deque)
    return next((kind for kind in kinds if issubclass(type(value), kind)), None)


def kept(container: Any) -> list[Any]:
    """What a container stores, whatever ``len()``, ``iter()`` or ``values()`` of a class of its own say."""
    kind = kind_of_container(container)
    return [*kind.values(container)] if issubclass(kind, dict) else [*kind.__iter__(container)]


def dict_of(value: Any) -> dict[str, Any] | None:
    """The attributes that an object itself has, as they are stored; ``None`` where it has none."""
    try:
        held = object.__getattribute__(value, "__dict__")
    except Exception:  # noqa: BLE001 - a class may compute it, by code of the user's
        return None
    return held if issubclass(type(held), dict) else None


def same(now: Any, then: Any) -> bool:
    """Whether this is the same object, or a plain value of the same type that no operator can tell apart.

    Lists are compared by their entries, any other mutable object by identity; a frozenset in the order of its entries.
    """
    if now is then:
        return True
    if type(now) is not type(then):
        return False
    if type(now) is list or isinstance(now, tuple | frozenset):
        now, then = kept(now), kept(then)
        return len(now) == len(then) and all(map(same, now, then))
    if not isinstance(now, PLAIN):
        return False
    if isinstance(now, float | complex):  # zero has a sign, and nan is nan
        return repr(now) == repr(then)
    return bool(now == then)


def same_inside(now: Any, then: Any) -> bool:
    """:func:`same`, with lists, tuples, deques, dicts and sets compared by their entries, in order, however deep."""
    if now is then:
        return True
    if type(now) is not type(then):
        return False
    if isinstance(now, list | tuple | deque | dict):
        if isinstance(now, dict) and [*dict.keys(now)] != [*dict.keys(then)]:
            return False
        now, then = kept(now), kept(then)
        return len(now) == len(then) and all(map(same_inside, now, then))
    if isinstance(now, set):
        return set.__eq__(now, then)
    return same(now, then)


def constant_key(value: Any) -> tuple | None:
    """A hashable stand-in for a plain constant, equal only for constants that are the :func:`same`.

    ``None`` for anything that is not plain.
    """
    if isinstance(value, int | float | complex):
        return type(value), repr(value)  # zero has a sign, nan is nan; a stand-in for a number cannot be compared
    if isinstance(value, _CONSTANTS):
        return type(value), value
    return None


def snapshot(value: Any) -> Any:
    """A shallow copy of a container, to tell later whether it was changed in place; else the value."""
    return value.copy() if type(value) in CONTAINERS else value


@contextmanager
def moved_generators() -> Iterator[list[str]]:
    """Collects the names of Python's and numpy's global generators that what runs inside draws from or seeds.

    Where there are other threads, one of them may have done it. Of Python's, the caller hears what this thread does.
    """
    moved: list[str] = []
    python, numpy = random.getstate(), _comparable(_numpy_state())
    yield moved
    if random.getstate() != python and is_alone():
        moved.append("random")
    if _comparable(_numpy_state()) != numpy:
        moved.append("numpy.random")


@contextmanager
def generators_put_back() -> Iterator[None]:
    """Undoes what runs inside do to Python's and numpy's global generators, which other threads must not draw from."""
    alone, python, numpy = is_alone(), random.getstate(), _numpy_state()
    try:
        yield
    finally:
        if alone and is_alone():  # else this would make the numbers come again that another one has drawn
            random.setstate(python)
            if numpy is not None:
                _numpy_random().set_state(numpy)


def _numpy_random() -> Any:
    return getattr(sys.modules.get("numpy"), "random", None)


def _numpy_state() -> tuple[Any, ...] | None:
    numpy = _numpy_random()
    return numpy.get_state() if numpy else None


def _comparable(state: tuple[Any, ...] | None) -> Any:
    return state and (state[0], state[1].tobytes(), *state[2:])
