"""Random generators that are not torch's, and iterators: whether a run moved them, and their states put back."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from bridge.base.errors import Unsupported, UnsupportedModule, user_line
from bridge.base.threads import is_alone, stack_of

__all__ = [
    "MovedObjects",
    "another_iterator",
    "generators_put_back",
    "is_iterator",
    "is_moved",
    "iterator_parts",
    "moved_generators",
]

_OWN_ITERATORS = ("builtins", "itertools")
"""Where the classes of iterators are from that code may hold."""


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


class MovedObjects:
    """Generators of the user's own (``random.Random``, ``numpy.random.default_rng()``) and iterators, as they are now.

    Args:
        values: with what leads to each; all others are passed over.
    """

    def __init__(self, values: Iterable[tuple[Any, Any]]):
        found = {id(value): (place, value) for place, value in values if is_moved(value)}
        self._states = [(place, value, _state(value)) for place, value in found.values()]

    def moved(self) -> list[Any]:
        """What leads to those that were moved since."""
        return [place for place, value, then in self._states if not _same_state(_state(value), then)]

    def restore(self) -> None:
        """Puts the generators back; an iterator has no way back, and is copied before it is moved."""
        for _, value, then in self._states:
            if _is_generator(value) and not _same_state(_state(value), then):
                _set_state(value, then)


def is_moved(value: Any) -> bool:
    """Whether a value is a generator that is not torch's, or an iterator."""
    return _is_generator(value) or is_iterator(value)


def is_iterator(value: Any) -> bool:
    """Whether a value is an iterator of Python's, or a generator function's, which code may move on."""
    kind = type(value)
    return kind.__module__ in _OWN_ITERATORS and hasattr(kind, "__next__") and hasattr(kind, "__iter__")


def iterator_parts(value: Any) -> tuple[Any, ...]:
    """How an iterator is made anew where it is: a function, its arguments, a state; a generator function's cannot."""
    try:
        return value.__reduce__()
    except TypeError:
        return _Unmoved, (type(value).__name__,)


def another_iterator(value: Any, copied: Callable[[Any], Any] = lambda part: part) -> Any:
    """Another iterator in the same place, over ``copied`` arguments; one that cannot be had refuses to be moved on."""
    function, arguments, *state = iterator_parts(value)
    made = function(*(another_iterator(each, copied) if is_iterator(each) else copied(each) for each in arguments))
    if state and state[0] is not None:
        made.__setstate__(state[0])
    return made


class _Unmoved:
    """In the place of what cannot be copied, and would be moved on for the user as well."""

    def __init__(self, name: str):
        self._name = name

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self, *given: Any) -> Any:
        where = user_line(stack_of(threading.get_ident())) or "forward"
        reason = "is moved on at every call; a compiled call runs no Python"
        raise UnsupportedModule("", [Unsupported(f"a {self._name}", where, reason, "pass what it yields to forward")])

    send = throw = close = __next__


def _place_of(value: Any) -> Any:
    """Where an iterator is, comparable."""
    if is_iterator(value):
        value = iterator_parts(value)
    if type(value) is tuple:
        return tuple(map(_place_of, value))
    if type(value) is list:
        return len(value)
    return value if type(value) in (int, float, str, bool, type(None)) else id(value)


def _is_generator(value: Any) -> bool:
    if isinstance(value, random.Random):
        return not isinstance(value, random.SystemRandom)
    numpy = _numpy_random()
    return numpy is not None and isinstance(value, (numpy.Generator, numpy.RandomState, numpy.BitGenerator))


def _state(value: Any) -> Any:
    if is_iterator(value):
        return _place_of(value)
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, _numpy_random().RandomState):
        return value.get_state(legacy=False)
    return getattr(value, "bit_generator", value).state


def _same_state(now: Any, then: Any) -> bool:
    return now == then if isinstance(now, tuple) else repr(now) == repr(then)


def _set_state(value: Any, state: Any) -> None:
    if isinstance(value, random.Random):
        value.setstate(state)
    elif isinstance(value, _numpy_random().RandomState):
        value.set_state(state)
    else:
        getattr(value, "bit_generator", value).state = state
