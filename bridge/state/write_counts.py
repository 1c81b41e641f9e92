"""Dictionary versions: whether a dictionary was written to, by CPython's count of writes, as Dynamo's guards read it.

A module's attributes, parameters, buffers and children are dictionaries; that none of them was written to since all of
it was looked at says in 30 ns what a look at each entry says in hundreds. It is not a public interface, so it is put
to the test once per process; where it is not there, or misses a write, entries are compared one by one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from bridge.base.torch_internals import dict_version

__all__ = ["dict_versions", "same_versions"]


def dict_versions(dicts: Iterable[dict[str, Any]]) -> list[int] | None:
    """A number for each dictionary that differs after every write to it; ``None`` where such numbers cannot be had."""
    version = _version()
    return None if version is None else list(map(version, dicts))


def same_versions(dicts: Iterable[dict[str, Any]], then: list[int] | None) -> bool:
    """Whether the dictionaries surely have not been written to since they had these numbers."""
    return then is not None and dict_versions(dicts) == then


@functools.cache
def _version() -> Callable[[dict[str, Any]], int] | None:
    return dict_version if dict_version is not None and _is_exact(dict_version) else None


class _Owner:
    pass


def _is_exact(version: Callable[[dict[str, Any]], int]) -> bool:
    """Whether every kind of write makes a number that was not there before, and reading none."""
    owner = _Owner()
    owner.first = owner.second = 1
    held = vars(owner)
    seen = {version(held)}

    def assign(value: Any) -> None:
        owner.first = value  # in a loop, so that the interpreter has its quick way for it

    writes: list[Callable[[], Any]] = [functools.partial(assign, value) for value in range(100)]
    writes += [
        lambda: held.__setitem__("second", 2),
        lambda: held.update(third=3),
        lambda: setattr(owner, "fourth", 4),
        lambda: delattr(owner, "fourth"),
        lambda: held.pop("third"),
        lambda: object.__setattr__(owner, "first", None),
        held.popitem,
        held.clear,
    ]
    for write in writes:
        write()
        now = version(held)
        if now in seen or now != version(held) or (list(held), owner.__dict__ is held, version(held))[2] != now:
            return False
        seen.add(now)
    return version({"x": 1}) not in seen
