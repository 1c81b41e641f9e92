"""Plain Python values: exact comparison, hashable keys; state of Python's and numpy's generators.

Values are equal only if no operator can tell them apart: 1, 1.0 and True differ, as do 0.0 and -0.0; nan equals nan.
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

__all__ = ["PLAIN", "constant_key", "dict_of", "generators_put_back", "kept", "kind_of_container"]
__all__ += ["moved_generators", "same"]

_CONSTANTS = (bool, int, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
PLAIN = (*_CONSTANTS, float, complex, bytes, tuple, frozenset)
"""Types of immutable values, which are compared by value."""


def kind_of_container(value: Any) -> type | None:
    """The built-in container class of a value, whose methods read the contents even if a subclass overrides them."""
    kinds = (OrderedDict, dict, list, tuple, set, frozenset, deque)
    return next((kind for kind in kinds if issubclass(type(value), kind)), None)


def kept(container: Any) -> list[Any]:
    """The stored elements of a container (values of a dict), even if a subclass overrides its methods."""
    kind = kind_of_container(container)
    return [*kind.values(container)] if issubclass(kind, dict) else [*kind.__iter__(container)]


def dict_of(value: Any) -> dict[str, Any] | None:
    """An object's own ``__dict__``, or ``None``."""
    try:
        held = object.__getattribute__(value, "__dict__")
    except Exception:  # noqa: BLE001 - a class may compute it by user code
        return None
    return held if issubclass(type(held), dict) else None


def same(now: Any, then: Any) -> bool:
    """Whether two values are the same object, or plain values of one type that no operator can tell apart.

    Lists are compared by elements, other mutable objects by identity, frozensets in iteration order; objects of a
    user's class of numbers or strings as the plain values that they extend, with their attributes.
    """
    if now is then:
        return True
    if (kind := type(now)) is not type(then):
        return False
    if kind is not list and kind not in PLAIN and not _same_attributes(now, then):
        return False
    if kind is list or isinstance(now, tuple | frozenset):
        now, then = kept(now), kept(then)
        return len(now) == len(then) and all(map(same, now, then))
    kind = next((each for each in PLAIN if issubclass(kind, each)), object)  # a stand-in for a number says it is one
    if kind in (float, complex):  # zero has a sign, and nan is nan
        return kind.__repr__(now) == kind.__repr__(then)
    return kind.__eq__(now, then) is True


def _same_attributes(now: Any, then: Any) -> bool:
    """Whether two objects of one class have the same attributes, and none in slots."""
    own = ([*(dict_of(each) or {}).items()] for each in (now, then))
    return same(*own) and not any(vars(base).get("__slots__") for base in type(now).__mro__)


def constant_key(value: Any) -> tuple | None:
    """A hashable key of a plain constant, equal only for constants that are :func:`same`; ``None``: not plain."""
    if isinstance(value, int | float | complex):
        return type(value), repr(value)  # zero has a sign, nan is nan; a symbolic number cannot be compared
    if isinstance(value, _CONSTANTS):
        return type(value), value
    return None


@contextmanager
def moved_generators() -> Iterator[list[str]]:
    """Context: yields a list that gets the names of the global generators (Python's, numpy's) whose state changed.

    Python's is reported only without other threads, which may have changed it; callers watch this thread's own draws.
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
    """Context that restores Python's and numpy's global generators at its end, unless there are other threads."""
    alone, python, numpy = is_alone(), random.getstate(), _numpy_state()
    try:
        yield
    finally:
        if alone and is_alone():  # else another thread's draws would be repeated
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
