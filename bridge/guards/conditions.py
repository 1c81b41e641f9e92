"""Conditions on what forward read: recorded reads → whether a call would read the same.

All of it is read when the guard is made, which is when forward has run for the last time. The quick path compares by
identity, names only where their dictionary was written to since; the thorough one takes equal plain values for the same,
and gives the reason.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter, is_
from types import CellType, FunctionType
from typing import Any

import torch
from torch import nn

from bridge.base.guard_failure import MODULE, GuardFailure
from bridge.base.torch_internals import MODULE_HOOKS
from bridge.guards.kinds import answer_of, contents_of
from bridge.guards.recording import ABSENT, Asked, Reads, slot_of
from bridge.state import dict_behind, dict_versions, same

__all__ = ["ReadGuard"]

_REGISTRIES = ("_parameters", "_buffers", "_modules", *MODULE_HOOKS)
_CODE, _DEFAULTS, _KEYWORDS, _BASES = map(attrgetter, ("__code__", "__defaults__", "__kwdefaults__", "__mro__"))


@dataclass(frozen=True)
class _Look:
    """Names in one dictionary, what they were, and the words for each."""

    space: dict[Any, Any]
    names: tuple[Any, ...]
    values: tuple[Any, ...]
    words: tuple[str, ...]

    def unchanged(self) -> bool:
        return all(map(is_, map(self.space.get, self.names, repeat(ABSENT)), self.values))

    def differences(self, alike: Callable[[Any, Any], bool]) -> Iterator[str]:
        now = map(self.space.get, self.names, repeat(ABSENT))
        return (words for value, then, words in zip(now, self.values, self.words, strict=True) if not alike(value, then))


@dataclass(frozen=True)
class _ClassLook:
    """Names in a class and its bases."""

    kind: type
    names: tuple[str, ...]
    values: tuple[Any, ...]
    words: tuple[str, ...]

    def unchanged(self) -> bool:
        return all(map(is_, map(_raw, repeat(self.kind), self.names), self.values))

    def differences(self, alike: Callable[[Any, Any], bool]) -> Iterator[str]:
        now = map(_raw, repeat(self.kind), self.names)
        return (words for value, then, words in zip(now, self.values, self.words, strict=True) if not alike(value, then))


class ReadGuard:
    """The conditions of one entry on what its forward read.

    Args:
        reads: as they were recorded.
        registered: the modules of the tree, which have conditions of their own.
        own: ids of dictionaries that have conditions elsewhere.
    """

    def __init__(self, reads: Reads, registered: Collection[nn.Module] = ()):
        tree = {id(each) for each in registered} | {id(each.__dict__) for each in registered}
        tree |= {id(each.__dict__.get(name)) for each in registered for name in _REGISTRIES} - {id(None)}
        looks: list[tuple[list[dict], _Look | _ClassLook]] = []
        unversioned: list[_Look | _ClassLook] = []
        for noted in reads.names.values():
            if id(noted.owner) in tree:
                continue
            names = tuple(noted.names)
            values = tuple(map(noted.owner.get, names, repeat(ABSENT)))
            look = _Look(noted.owner, names, values, tuple(noted.names.values()))
            dicts = dict_behind(noted.owner) if type(noted.owner) is dict else None
            looks.append(([dicts], look)) if dicts is not None else unversioned.append(look)
        for module, names in reads.modules.values():
            if id(module) not in tree:
                looks += [([each.space], each) for each in _of_module(module, names)]
        self._exact = [(held, name, held.get(name, ABSENT), words) for (_, name), (held, words) in reads.exact.items()]
        self._classes = []
        for noted in reads.classes.values():
            kind, names = noted.owner, tuple(noted.names)
            look = _ClassLook(kind, names, tuple(map(_raw, repeat(kind), names)), tuple(noted.names.values()))
            found = [dict_behind(vars(base)) for base in kind.__mro__ if base is not object]
            looks.append((found, look)) if None not in found else unversioned.append(look)
            self._classes.append(kind)
        self._bases = [kind.__mro__ for kind in self._classes]
        self._by_dict: dict[int, list[_Look | _ClassLook]] = {}
        self._dicts: list[dict] = []
        for dicts, look in looks:
            for each in dicts:
                if id(each) not in self._by_dict:
                    self._dicts.append(each)
                self._by_dict.setdefault(id(each), []).append(look)
        self._looks, self._unversioned = [look for _, look in looks], unversioned
        self._versions: list[int] | None = None
        owned = [(value, words) for value, words in reads.types.values() if id(value) not in tree]
        self._typed, self._type_words = [value for value, _ in owned], [words for _, words in owned]
        self._types = list(map(type, self._typed))
        self._functions(reads)
        self._slots = [(value, name, slot_of(value, name), words) for (_, name), (value, words) in reads.slots.items()]
        self._contents = []
        for value, words in reads.contents.values():
            if id(value) not in tree and (read := contents_of(value)) is not None:
                self._contents.append((value, read, read(value), words))
        self._asked: list[tuple[Asked, Any]] = [(each, answer_of(each)) for each in reads.asked.values()]

    def _functions(self, reads: Reads) -> None:
        ran = {code for code, flow in reads.codes.items() if flow is not None}
        found = [function for function, _ in reads.functions.values()]
        self._code_of = found
        self._codes = list(map(_CODE, found))
        run = [function for function in found if function.__code__ in ran]
        self._run = run
        self._defaults, self._keywords = list(map(_DEFAULTS, run)), list(map(_KEYWORDS, run))
        cells = {id(cell): (cell, name, f) for f in run for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=False)}
        self._cells: list[tuple[CellType, Any, str]] = [
            (cell, _cell(cell), f"variable '{name}' around {function.__qualname__}") for cell, name, function in cells.values()
        ]

    def unchanged(self) -> bool:
        """Whether all of it is the very same."""
        if list(map(type, self._typed)) != self._types or not all(map(is_, map(_BASES, self._classes), self._bases)):
            return False
        if not all(map(is_, map(_CODE, self._code_of), self._codes)):
            return False
        if not (all(map(is_, map(_DEFAULTS, self._run), self._defaults)) and all(map(is_, map(_KEYWORDS, self._run), self._keywords))):
            return False
        if not all([held.get(name, ABSENT) is then for held, name, then, _ in self._exact]):
            return False
        if not all([_cell(cell) is then for cell, then, _ in self._cells]):
            return False
        if not all([same(slot_of(value, name), then) for value, name, then, _ in self._slots]):
            return False
        if not all([look.unchanged() for look in self._unversioned]):
            return False
        if not all([_same_state(read(value), then) for value, read, then, _ in self._contents]):
            return False
        if not all([_same_answer(answer_of(each), then) for each, then in self._asked]):
            return False
        now, then = dict_versions(self._dicts), self._versions  # before the look: a write meanwhile is seen next time
        if now is not None and now == then:
            return True
        for place, each in enumerate(self._dicts):
            if now is None or then is None or now[place] != then[place]:
                if not all([look.unchanged() for look in self._by_dict[id(each)]]):
                    return False
        self._versions = now
        return True

    def match(self) -> None:
        """Raises :class:`GuardFailure`, naming the first thing that is not what it was; equal plain values are."""
        for what in self.differences():
            raise GuardFailure(MODULE, f"{what} changed")

    def differences(self) -> Iterator[str]:
        """What is not what it was."""
        for value, then, words in zip(self._typed, self._types, self._type_words, strict=True):
            if type(value) is not then:
                yield f"class of {words or then.__name__}"
        for kind, then in zip(self._classes, self._bases, strict=True):
            if kind.__mro__ is not then and kind.__mro__ != then:
                yield f"bases of class {kind.__name__}"
        for function, code in zip(self._code_of, self._codes, strict=True):
            if function.__code__ is not code:
                yield f"code of {function.__qualname__}"
        for function, defaults, keywords in zip(self._run, self._defaults, self._keywords, strict=True):
            if not (self._alike(function.__defaults__, defaults) and self._alike(function.__kwdefaults__, keywords)):
                yield f"default arguments of {function.__qualname__}"
        for cell, then, words in self._cells:
            if not self._alike(_cell(cell), then):
                yield words
        for held, name, then, words in self._exact:
            if held.get(name, ABSENT) is not then:
                yield words
        for value, name, then, words in self._slots:
            if not self._alike(slot_of(value, name), then):
                yield f"attribute '{words}'"
        for look in (*self._looks, *self._unversioned):
            yield from look.differences(self._alike)
        for value, read, then, words in self._contents:
            if not _same_state(read(value), then):
                yield words
        for each, then in self._asked:
            if not _same_answer(answer_of(each), then):
                yield f"what {each.words} gives"

    def _alike(self, now: Any, then: Any, deep: int = 8) -> bool:
        """Whether a value means the same: it is the same, equal plain data, or an object whose fields all are."""
        if same(now, then):
            return True
        if type(now) is not type(then) or now is ABSENT or not deep:
            return False
        if isinstance(now, torch.Tensor | nn.Module | type | types.ModuleType | FunctionType | types.MethodType):
            return False
        if isinstance(now, list | tuple):
            return len(now) == len(then) and all(self._alike(a, b, deep - 1) for a, b in zip(now, then, strict=True))
        if isinstance(now, dict):
            return list(now) == list(then) and all(self._alike(now[name], then[name], deep - 1) for name in now)
        if isinstance(now, set | frozenset):
            return now == then and all(isinstance(each, str | int) for each in now)
        if contents_of(now) is not None or not hasattr(now, "__dict__") or type(now).__module__ == "builtins":
            return False
        ours, theirs = vars(now), vars(then)
        return list(ours) == list(theirs) and all(self._alike(ours[name], theirs[name], deep - 1) for name in ours)


def _of_module(module: nn.Module, names: Collection[str]) -> Iterator[_Look]:
    """What was read of a module that is not in the tree."""
    own = module.__dict__
    for space in (own, *(own[each] for each in ("_parameters", "_buffers", "_modules"))):
        found = tuple(sorted(name for name in (own if "*" in names and space is own else names) if name in space or space is own))
        if found and type(space) is dict:
            words = tuple(f"attribute '{name}' of a {type(module).__name__}" for name in found)
            yield _Look(space, found, tuple(map(space.get, found, repeat(ABSENT))), words)


def _raw(kind: type, name: str) -> Any:
    for base in kind.__mro__:
        held = base.__dict__
        if name in held:
            return held[name]
    return ABSENT


def _cell(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return ABSENT


def _same_state(now: Any, then: Any) -> bool:
    if type(now) is list:
        return len(now) == len(then) and (all(map(is_, now, then)) or all(map(_same_entry, now, then)))
    return bool(now == then)


def _same_entry(now: Any, then: Any) -> bool:
    if type(now) is tuple and type(then) is tuple:
        return len(now) == len(then) and all(map(same, now, then))
    return same(now, then)


def _same_answer(now: Any, then: Any) -> bool:
    if same(now, then):
        return True
    if type(now) is list and type(then) is list:
        return len(now) == len(then) and all(map(_same_answer, now, then))
    return isinstance(now, str | int | float | tuple | dict | bytes) and type(now) is type(then) and bool(now == then)


