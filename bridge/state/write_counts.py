"""Dictionary versions: a dictionary → CPython's count of its writes, which Dynamo's guards read as well.

A module's attributes, parameters, buffers and children are dictionaries. An unchanged count proves in 30 ns that a
dictionary is unchanged; comparing its entries takes hundreds. The count is not a public interface, so it is tested once
per process; if it is missing, or misses a write, entries are compared one by one.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from bridge.base.torch_internals import dict_version

__all__ = ["dict_behind", "dict_versions", "write_counter"]


def dict_versions(dicts: Iterable[dict[str, Any]]) -> list[int] | None:
    """A number for each dictionary that differs after every write to it; ``None``: not available.

    From Python 3.12 on, an empty dictionary that is filled by ``update`` may keep its number.
    """
    version = write_counter()
    try:
        return None if version is None else list(map(version, dicts))
    except RuntimeError:  # another mapping, without a write count
        return None


def dict_behind(namespace: Mapping[str, Any]) -> dict[str, Any] | None:
    """The dictionary of a namespace: itself, or the one behind a class's ``vars()``; ``None``: no count of writes."""
    if write_counter() is None:
        return None
    if type(namespace) is dict:
        return namespace
    if type(namespace) is not MappingProxyType or not _classes_are_counted():
        return None
    return _behind(namespace)


def _behind(namespace: MappingProxyType) -> dict[str, Any] | None:
    found = gc.get_referents(namespace)
    return found[0] if len(found) == 1 and type(found[0]) is dict else None


@functools.cache
def write_counter() -> Callable[[dict[str, Any]], int] | None:
    """A function in C: a dictionary → its number, as in :func:`dict_versions`; ``None``: not available."""
    return dict_version if dict_version is not None and _is_exact(dict_version) else None


@functools.cache
def _classes_are_counted() -> bool:
    """Whether every kind of write to a class makes a new number, and reading none."""
    version = write_counter()

    class Base:
        pass

    class Owner(Base):
        first = second = 1

    held, owner = _behind(vars(Owner)), Owner()
    if held is None or version is None or _behind(vars(Base)) is held:
        return False

    def assign(value: Any) -> None:
        Owner.first = value

    writes = [
        lambda: setattr(Owner, "third", 3),
        lambda: delattr(Owner, "third"),
        lambda: type.__setattr__(Owner, "second", 2),
        lambda: setattr(Owner, "method", lambda self: 1),
    ]
    reads = lambda: (owner.first, Owner.second, vars(Owner)["first"], setattr(owner, "own", 1))  # noqa: E731
    return _are_counted(version, held, assign, writes, reads) is not None


class _Owner:
    pass


def _is_exact(version: Callable[[dict[str, Any]], int]) -> bool:
    """Whether every kind of write to an object's dictionary makes a new number."""
    owner = _Owner()
    owner.first = owner.second = 1
    held = vars(owner)

    def assign(value: Any) -> None:
        owner.first = value

    writes = [
        lambda: held.__setitem__("second", 2),
        lambda: held.update(third=3),
        lambda: setattr(owner, "fourth", 4),
        lambda: delattr(owner, "fourth"),
        lambda: held.pop("third"),
        lambda: object.__setattr__(owner, "first", None),
        held.popitem,
        held.clear,
    ]
    seen = _are_counted(version, held, assign, writes, lambda: (list(held), owner.__dict__ is held))
    return seen is not None and version({"x": 1}) not in seen


def _are_counted(
    version: Callable[[dict], int], held: dict, assign: Callable[[Any], None], writes: list, reads: Callable[[], Any]
) -> set[int] | None:
    """The numbers that a dictionary had, if every write made a new one and reading none, else ``None``.

    The loop of assignments comes first, so that the interpreter specializes the store.
    """
    seen = {version(held)}
    for write in (*(functools.partial(assign, value) for value in range(100)), *writes):
        write()
        now = version(held)
        if now in seen or now != version(held) or (reads(), version(held))[1] != now:
            return None
        seen.add(now)
    return seen
