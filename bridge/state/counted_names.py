"""Counted names: attributes of classes and names in namespaces that change by a write to a dictionary alone.

CPython counts the writes to a dictionary (:mod:`bridge.state.write_counts`). A class and a file hold hundreds of names
that a call may use, and hardly ever is one of them written: so a few counts are compared, and names are looked at only
where a dictionary was written to since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter, is_
from typing import Any, NamedTuple

from bridge.state.names import UNSET
from bridge.state.write_counts import dict_behind, dict_versions

__all__ = ["CountedNames", "dicts_of_class", "dicts_of_namespace", "steady_names"]

_WRITTEN_BY_NOBODY = (object, type)
_BASES = attrgetter("__mro__")


class _Look(NamedTuple):
    """``read(source)`` gives the values of some names; ``values`` are those that are expected."""

    read: Callable[[Any], tuple]
    source: Any
    values: tuple

    def unchanged(self) -> bool:
        try:
            return all(map(is_, self.read(self.source), self.values))
        except (KeyError, AttributeError):
            return False


class CountedNames:
    """Names and what they were; threads may ask at the same time.

    Attributes:
        dicts: the dictionaries that decide what the names are, as long as :attr:`classes` are as they were.
    """

    def __init__(self) -> None:
        self._looks: dict[int, list[_Look]] = {}  # by the dictionary's id
        self.dicts: list[dict[str, Any]] = []
        self._classes: list[type] = []
        self._metas: list[type] = []
        self._bases: list[tuple[type, ...]] = []
        self._versions: list[int] | None = None

    def add(self, read: Callable[[Any], tuple], source: Any, values: Iterable[Any], dicts: Sequence[dict]) -> None:
        """Names that ``read(source)`` gives the values of, and the dictionaries that decide it."""
        look = _Look(read, source, tuple(values))
        for each in dicts:
            if id(each) not in self._looks:
                self.dicts.append(each)
            self._looks.setdefault(id(each), []).append(look)
        if isinstance(source, type):
            self._classes.append(source)
            self._metas.append(type(source))
            self._bases.append(source.__mro__)

    @property
    def classes(self) -> tuple[tuple[Callable[[type], Any], list[type], list[Any]], ...]:
        """What else decides: getters, the classes that each is for, and what it has to give for each of these."""
        return (type, self._classes, self._metas), (_BASES, self._classes, self._bases)

    def unchanged(self) -> bool:
        """Whether all of them are the very same."""
        if not all(all(map(is_, map(getter, sources), then)) for getter, sources, then in self.classes):
            return False
        now, then = dict_versions(self.dicts), self._versions
        if now is not None and now == then:
            return True
        looks: dict[int, _Look] = {}
        for place, each in enumerate(self.dicts):
            if now is None or then is None or now[place] != then[place]:
                looks.update((id(look), look) for look in self._looks[id(each)])
        if not all(look.unchanged() for look in looks.values()):
            return False
        self._versions = now  # from before the look: what is written meanwhile is seen next time
        return True


def dicts_of_namespace(namespace: Mapping[str, Any]) -> list[dict] | None:
    """The dictionary that decides what a namespace holds; ``None`` where writes to it are not counted."""
    found = dict_behind(namespace)
    return None if found is None else [found]


def dicts_of_class(kind: type) -> list[dict] | None:
    """The dictionaries that decide what an attribute of a class is, as long as its bases and its class are the same.

    ``None`` where writes to them are not counted, or where its class computes attributes.
    """
    if type(kind).__getattribute__ is not type.__getattribute__:
        return None
    owners = [each for each in (*kind.__mro__, *type(kind).__mro__) if each not in _WRITTEN_BY_NOBODY]
    found = [dict_behind(vars(each)) for each in owners]
    return None if None in found else found


def steady_names(kind: type, names: Iterable[str]) -> list[str]:
    """Those of a class's attributes that are what its dictionaries hold: no descriptor computes them."""
    return [name for name in names if _is_steady(kind, name)]


def _is_steady(kind: type, name: str) -> bool:
    if any(name in vars(each) for each in type(kind).__mro__):
        return False
    held = next((vars(each)[name] for each in kind.__mro__ if name in vars(each)), UNSET)
    value = getattr(kind, name, None)
    return held is value or (isinstance(held, staticmethod) and held.__func__ is value)
