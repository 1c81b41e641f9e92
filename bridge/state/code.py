"""Code guard: a module's classes and functions → the attributes, globals and variables around them, as they were.

``forward`` may read ``self.scale`` from the class, a flag of its file, ``settings.scale`` of another one, a variable of
the function that defines it, or call a helper; any of them may be changed between calls, the code itself included (a
notebook's autoreload puts new code into old functions). Noted are the class attributes that a module in the tree sees
(of classes below ``nn.Module``), the names that the functions among them reach (:mod:`bridge.state.names`), their code
and their default arguments. They are compared by identity, and what is mutable by contents; attributes of classes and
names of files only after a write to the dictionaries that hold them (:mod:`bridge.state.counted_names`).
"""

from __future__ import annotations

import argparse
import operator
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter, is_, itemgetter
from types import CellType, FunctionType, SimpleNamespace
from typing import Any

from torch import nn

from bridge.base.guard_failure import MODULE, GuardFailure
from bridge.state.attribute_reads import words_of
from bridge.state.counted_names import CountedNames, dicts_of_class, dicts_of_namespace, steady_names
from bridge.state.generators import another_iterator, is_iterator
from bridge.state.many_contents import ManyContents
from bridge.state.names import (
    NOT_FORWARD,
    UNSET,
    Space,
    cell_value,
    function_class,
    functions_of,
    is_torchs,
    names_of,
    spaces_of,
    with_helpers,
    written_bases,
)
from bridge.state.reachable import Contents, Fields, Reached
from bridge.state.values import same
from bridge.state.write_counts import dict_versions

__all__ = ["CodeGuard", "set_name"]

_CODE = attrgetter("__code__")
_DEFAULTS = "__defaults__", "__kwdefaults__"
_call = getattr(operator, "call", lambda read, source: read(source))  # in C since Python 3.11


class CodeGuard:
    """The conditions of one entry on code.

    Args:
        classes: of the modules in the tree, and of objects that they hold.
        functions: further functions that a call may run: attributes, forwards set on an instance.
        registered: the modules of the tree, which are guarded elsewhere; code may name them by a global, too.
    """

    def __init__(
        self,
        classes: Iterable[type],
        functions: Iterable[FunctionType] = (),
        registered: Collection[nn.Module] = (),
    ):
        kinds, functions = dict.fromkeys(classes), list(functions)
        while True:  # what is found may be functions and classes again: a table of activations, a settings object
            reached = self._note_all(kinds, functions, Reached(registered=registered))
            found = [function for function in reached.functions if function not in functions]
            if not found and reached.kinds.keys() <= kinds.keys():
                break
            functions += found
            kinds.update(reached.kinds)
        self._codes = list(map(_CODE, self._functions))
        self._contents = [*reached.contents, *_environment(self._functions)]
        self._counted = [each for each in self._contents if each.counted is not None]
        self._uncounted = ManyContents([each for each in self._contents if each.counted is None])
        self._dicts = [*self._counted_names.dicts, *(each.counted for each in self._counted)]
        self._versions: list[int] | None = None
        for each in (*self._counted_names.classes, (_CODE, self._functions, self._codes)):
            self._expect_each(*each)

    def _note_all(self, kinds: Iterable[type], functions: Sequence[FunctionType], reached: Reached) -> Reached:
        self._read: list[tuple[Callable[[Any], Any], Any]] = []
        self._values: list[Any] = []
        self._single, self._several = ([], [], []), ([], [], [])  # the same for :meth:`unchanged`, without calls here
        self._counted_names = CountedNames()
        self._reasons: list[str] = []
        self._places: list[tuple[Any, str]] = []
        self._apart: list[tuple[Any, str, Any]] = []
        self._reached = reached
        for kind in kinds:
            self._note_class(kind)
        self._functions = with_helpers((*chain.from_iterable(map(functions_of, kinds)), *functions))
        self._note_names()
        defaults = {name: _tuple_of(attrgetter, [name]) for name in _DEFAULTS}
        for function in self._functions:
            if function.__defaults__ or function.__kwdefaults__:
                for name, read in defaults.items():
                    self._note(read, function, {name: f"default arguments of {function.__qualname__}"})
        return self.__dict__.pop("_reached")

    def _note_class(self, kind: type) -> None:
        found = [
            name
            for base in written_bases(kind)
            if not is_torchs(base)
            for name in vars(base)
            if name not in NOT_FORWARD and not (name.startswith("__") and name.endswith("__"))
            if getattr(kind, name, UNSET) is getattr(kind, name, None)  # a classmethod is bound anew at every look
        ]
        names = list(dict.fromkeys([name for name in ("forward",) if hasattr(kind, name)] + found))
        dicts = dicts_of_class(kind)
        steady = [] if dicts is None else steady_names(kind, names)
        for some, decide in ((steady, dicts), ([name for name in names if name not in steady], None)):
            reasons = {
                name: f"{name} of class {kind.__name__}"
                if name == "forward"
                else f"attribute '{name}' of class {kind.__name__}"
                for name in some
            }
            if some:
                self._note(_tuple_of(attrgetter, some), kind, reasons, dicts=decide)

    def _note_names(self) -> None:
        cells: dict[int, tuple[CellType, str]] = {}
        spaces: dict[int, tuple[Space, dict[str, str]]] = {}
        for function in self._functions:
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
                if cell_value(cell) is not UNSET:
                    cells.setdefault(id(cell), (cell, f"variable '{name}' around {function.__qualname__}"))
            for space in spaces_of(function):
                _, reasons = spaces.setdefault(id(space.owner), (space, {}))
                reasons.update((name, f"global '{space.prefix}{name}'") for name in space.names)
        for space, reasons in spaces.values():
            given = space.namespace, reasons, space.owner, space.is_users, dicts_of_namespace(space.namespace)
            self._note(_tuple_of(itemgetter, list(reasons)), *given)
        for cell, reason in cells.values():
            self._note(_cell_tuple, cell, {"cell_contents": reason})

    def _note(
        self,
        read: Callable[[Any], tuple],
        source: Any,
        reasons: dict[str, str],
        owner: Any = None,
        contents: bool = True,
        dicts: Sequence[dict] | None = None,
    ) -> None:
        """Remembers what ``read(source)`` gives, the values of these names; ``owner`` is where they can be set, and
        ``dicts`` alone decide what they are."""
        values = read(source)
        self._read.append((read, source))
        self._values += values
        if dicts is not None:
            self._counted_names.add(read, source, values, dicts)
        elif (single := getattr(read, "single", None)) is not None:
            self._expect_each(single, [source], values)
        else:
            getters, sources, expected = self._several
            getters.append(read)
            sources.append(source)
            expected += values
        self._reasons += reasons.values()
        self._places += [(source if owner is None else owner, name) for name in reasons]
        for value, reason in zip(values, reasons.values(), strict=True):
            if (kind := function_class(value)) is not None:
                self._reached.kinds[kind] = None
            elif contents and _is_users(value):
                self._reached.add(reason, value)

    def _expect_each(self, getter: Callable[[Any], Any], sources: Sequence[Any], expected: Sequence[Any]) -> None:
        """:meth:`unchanged` asks what ``getter`` gives for each of these sources."""
        for each, to in zip(([getter] * len(sources), sources, expected), self._single, strict=True):
            to += each

    def mentions(self, *names: str) -> bool:
        """Whether one of these names occurs in the code."""
        return any(not set(names).isdisjoint(names_of(function.__code__)) for function in self._functions)

    @property
    def words(self) -> frozenset[str]:
        """Names and texts in the code."""
        return frozenset(chain.from_iterable(words_of(function.__code__) for function in self._functions))

    def values(self) -> Iterator[Any]:
        """What the names had for values, and what those held."""
        return chain(self._values, *(contents.values for contents in self._contents))

    def named_values(self) -> Iterator[tuple[str, Any]]:
        """The same, with what leads to each."""
        held = ((contents.place, value) for contents in self._contents for value in contents.values)
        return chain(zip(self._reasons, self._values, strict=True), held)

    def take_apart(self, instead: Callable[[Any], Any]) -> None:
        """Names of iterators lead to other ones in the same place, until :meth:`put_together`; so do others to what
        ``instead`` gives for them."""
        for index, ((owner, name), value) in enumerate(zip(self._places, self._values, strict=True)):
            made = another_iterator(value) if is_iterator(value) else instead(value)
            if made is not None:
                self._apart.append((owner, name, value))
                self._values[index] = made
                set_name(owner, name, self._values[index])

    def put_together(self) -> None:
        """Names lead to the iterators that they led to."""
        while self._apart:
            set_name(*self._apart.pop())

    def unchanged(self) -> bool:
        """Whether all of it is the very same."""
        try:
            if not all(map(is_, map(_call, *self._single[:2]), self._single[2])):
                return False
            if self._several[0] and not all(
                map(is_, chain.from_iterable(map(_call, *self._several[:2])), self._several[2])
            ):
                return False
        except (KeyError, AttributeError, ValueError):  # gone, or an empty cell
            return False
        if self._uncounted and not self._uncounted.unchanged():
            return False
        versions = dict_versions(self._dicts)  # before the look: what is written meanwhile is seen next time
        if versions is not None and versions == self._versions:
            return True
        if not self._counted_names.unchanged() or not all(contents.unchanged() for contents in self._counted):
            return False
        self._versions = versions
        return True

    def match(self) -> None:
        """Raises :class:`GuardFailure`, naming the first thing that is not what it was; equal plain values are."""
        for what in self.differences():
            raise GuardFailure(MODULE, f"{what} changed")

    def differences(self) -> Iterator[str]:
        """What is not what it was."""
        reasons = iter(self._reasons)
        values = iter(self._values)
        for read, source in self._read:
            try:
                found = read(source)
            except (KeyError, AttributeError) as missing:
                yield f"a name that the code uses is gone: {missing}, it"
                return
            for now, then, reason in zip(found, values, reasons, strict=False):
                if not same(now, then):
                    yield reason
        for function, code in zip(self._functions, self._codes, strict=True):
            if function.__code__ is not code:
                yield f"code of {function.__qualname__}"
        for contents in self._contents:
            if not contents.unchanged():
                yield contents.place

    def set_since(self) -> list[tuple[Any, str, Any, Any]]:
        """Globals, variables of enclosing scopes and settings in classes that were set: owner, name, before, now."""
        now = chain.from_iterable(read(source) for read, source in self._read)
        found = zip(self._places, self._values, now, strict=False)
        changed = ((*place, then, value) for place, then, value in found if not same(value, then))
        return [each for each in changed if not hasattr(each[2], "__get__")]  # a method is not what it is looked up as

    @property
    def contents(self) -> list[Contents]:
        """What the names lead to and may change."""
        return self._contents

    def restore(self) -> None:
        """Puts back globals, variables of enclosing scopes, settings in classes, and contents of what they hold."""
        for owner, name, then, _ in self.set_since():
            set_name(owner, name, then)
        for contents in self._contents:
            contents.restore()


def set_name(owner: Any, name: str, value: Any) -> None:
    """Sets what a name in a namespace, or of an object, leads to."""
    if isinstance(owner, dict):
        owner[name] = value
    else:
        setattr(owner, name, value)


def _is_users(value: Any) -> bool:
    """Whether an object's fields are settings of the user's, not the state of some library's machinery."""
    if isinstance(value, list | dict | set | tuple | argparse.Namespace | SimpleNamespace | partial | nn.Module):
        return True
    library = type(value).__module__.partition(".")[0]
    return library != "torch" and library not in sys.stdlib_module_names


def _environment(functions: Sequence[FunctionType]) -> list[Contents]:
    """The environment's variables that the code may ask for: those whose names are written in it."""
    asking = [f.__code__ for f in functions if not {"environ", "getenv"}.isdisjoint(names_of(f.__code__))]
    names = [constant for code in asking for constant in code.co_consts if isinstance(constant, str)]
    if not names:
        return []
    return [Contents("an environment variable", Fields(_variables, list(map(os.fsencode, names))))]


def _variables(names: Sequence[bytes]) -> list[bytes | None]:
    return list(map(os.environ._data.get, names))


def _tuple_of(getter: Callable[..., Callable[[Any], Any]], names: Sequence[str]) -> Callable[[Any], tuple]:
    """``itemgetter`` or ``attrgetter`` of these names; a tuple also for a single one."""
    if len(names) > 1:
        return getter(*names)
    single = getter(*names)

    def read(source: Any) -> tuple:
        return (single(source),)

    read.single = single
    return read


def _cell_tuple(cell: CellType) -> tuple[Any]:
    return (cell_value(cell),)


_cell_tuple.single = attrgetter("cell_contents")
