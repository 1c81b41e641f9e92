"""Python's and numpy's global random generators: whether a run moved them, and their states put back."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bridge.base.threads import is_alone

__all__ = ["generators_put_back", "moved_generators"]


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
