"""Values of sources: a function that runs, a source → the objects that it may be; notes what is read on the way."""

from __future__ import annotations

import operator
import sys
import types
from collections.abc import Iterable
from contextlib import suppress
from importlib.util import find_spec
from types import FrameType, ModuleType
from typing import Any

from bridge.guards.flow import DataFlow, Source
from bridge.guards.insides import Insides
from bridge.guards.kinds import PLAIN, answer_of, is_a
from bridge.guards.objects import FrameOf, Instance, dict_of, interesting
from bridge.guards.watched import ABSENT, Missing, Place, class_entry

__all__ = ["Frame", "Sources"]

_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "%": operator.mod}


class Frame:
    """A function that runs.

    Attributes:
        args, cells: its arguments and the variables around it, when it begins.
        results, plain: what functions in Python gave it, by the offset of the call: objects, and plain values.
        called: likewise what functions in C may have given it.
        python: offsets of calls of functions in Python.
        fresh: offsets of calls whose results were not followed yet.
        over: whether it has returned.
        locals: its variables, while a function in C is about to be called.
    """

    __slots__ = (
        "args",
        "builtins",
        "called",
        "cells",
        "code",
        "flow",
        "frame",
        "fresh",
        "globals",
        "locals",
        "memo",
        "over",
        "plain",
        "python",
        "results",
    )

    def __init__(self, frame: FrameType, flow: DataFlow, args: dict[str, Any], cells: dict[str, Any]):
        self.flow, self.args, self.cells, self.code = flow, args, cells, frame.f_code
        self.globals, self.builtins, self.frame = frame.f_globals, frame.f_builtins, frame
        self.results: dict[int, list[Any]] = {}
        self.plain: dict[int, list[Any]] = {}
        self.called: dict[int, list[Any]] = {}
        self.python: set[int] = set()
        self.memo: dict[Source, list[Any]] = {}
        self.locals: dict[str, Any] = {}
        self.fresh: set[int] = set()
        self.over = False

    @property
    def where(self) -> str:
        return f"{self.code.co_filename}:{self.code.co_firstlineno}"


class Sources(Insides):
    """A world in which functions run."""

    def _constants(self, frame: Frame, sources: Iterable[Source]) -> list[Any]:
        """The values of sources, plain ones (numbers, strings) too, as keys and arguments of C functions are."""
        found: list[Any] = []
        for value in (value for source in sources for value in self._plain(frame, source)):
            if not any(
                value is each or (type(value) in PLAIN and type(each) in PLAIN and value == each) for each in found
            ):
                found.append(value)
        return found

    def _plain(self, frame: Frame, source: Source) -> list[Any]:
        kind = source[0]
        if kind == "const":
            return [source[1]]
        if kind == "local":
            return [frame.locals[source[1]]] if source[1] in frame.locals else []
        if kind in ("arg", "cell"):
            value = (frame.args if kind == "arg" else frame.cells).get(source[1], ABSENT)
            return [] if value is ABSENT or is_a(value, Instance) else [value]
        if kind == "global":
            return next(([space[source[1]]] for space in (frame.globals, frame.builtins) if source[1] in space), [])
        if kind == "attr":
            owners = self._plain(frame, source[1])
            return [value for owner in owners if (value := _peek(owner, source[2])) is not ABSENT]
        if kind == "item":
            found = []
            for owner in self._plain(frame, source[1]):
                for key in self._constants(frame, (source[2],)) if type(owner) in (dict, list, tuple) else ():
                    try:
                        found.append(owner[key])
                    except (KeyError, IndexError, TypeError):
                        continue
            return found
        if kind == "op":
            return self._operated(frame, *source[1:])
        if kind == "result":
            return [*frame.plain.get(source[1], ()), *frame.results.get(source[1], ())]
        return self._values(frame, source)

    def _operated(self, frame: Frame, symbol: str, left: Source, right: Source) -> list[Any]:
        found, kinds = [], (str, bytes, int, float)
        for a in self._plain(frame, left):
            for b in self._plain(frame, right) if type(a) in kinds else ():
                if type(b) in kinds or (symbol == "%" and type(b) is tuple):
                    with suppress(TypeError, ValueError):
                        found.append(_OPERATORS[symbol](a, b))
        return found

    def _values(self, frame: Frame, source: Source) -> list[Any]:
        """The objects that a source may be; what is read on the way is noted."""
        found = frame.memo.get(source)
        if found is None:
            frame.memo[source] = []  # while it is looked for
            found = frame.memo[source] = self._find(frame, source)
        return found

    def _find(self, frame: Frame, source: Source) -> list[Any]:
        kind, of = source[0], source[1] if len(source) > 1 else None
        if kind in ("arg", "cell"):
            value = (frame.args if kind == "arg" else frame.cells).get(of, ABSENT)
            return interesting(value)
        if kind == "global":
            value = self.name(frame.globals, of, Place("global", of))
            if value is ABSENT:
                value = self.name(frame.builtins, of, Place("builtin", of))
            return interesting(value)
        if kind == "attr":
            return [value for owner in self._values(frame, of) for value in self.attribute(owner, source[2])]
        if kind == "import":
            return self._import(frame, *source[1:])
        if kind in ("result", "called"):
            return (frame.results if kind == "result" else frame.called).get(of, [])
        if kind == "held" or (kind in ("each", "item", "in") and of[0] == "held"):
            return self._values(frame, of)
        if kind == "super":
            frame.cells.get("__class__")
            first = next(iter(frame.args.values()), None)
            one = frame.cells.get("__class__")
            found = is_a(one, type) and (is_a(first, one) or (is_a(first, type) and issubclass(first, one)))
            return self.attribute(super(one, first), of) if found else []
        if kind == "each":
            owners = self._values(frame, of)
            made = owners if of[0] in ("result", "called") else []
            return [*made, *(value for owner in owners for value in self._each(frame, owner))]
        if kind in ("item", "in"):
            keys = self._keys(frame, source[2])
            owners = self._values(frame, of)
            made = owners if of[0] in ("result", "called") else []
            kind, offset = source[2][0], source[2][1]
            unheard = (kind == "called" and offset in frame.python) or (kind == "result" and offset in frame.called)
            if not keys and (not frame.over or unheard):
                return []  # the key is not there yet, or is found as what another function gives
            if not keys:
                return [*made, *(value for owner in owners for value in self._each(frame, owner))]
            return [*made, *(value for owner in owners for key in keys for value in self.entry(owner, key))]
        return []

    def _keys(self, frame: Frame, source: Source) -> list[Any]:
        """The keys that a source may be; none where a function in C makes them."""
        if source[0] == "called" or (source[0] == "result" and source[1] not in frame.python):
            return []
        return self._constants(frame, (source,))

    def _each(self, frame: Frame, owner: Any) -> list[Any]:
        self.whole(owner, frame.where)
        return self.inside(owner, 1)

    def _import(self, frame: Frame, name: str, level: int, several: bool) -> list[Any]:
        package = frame.globals.get("__package__") or ""
        for _ in range(level - 1):
            package = package.rpartition(".")[0]
        full = f"{package}.{name}".strip(".") if level else name
        full = full if several or level else full.partition(".")[0]
        value = self.name(sys.modules, full, Place("module", full))
        if value is ABSENT and answer_of(find_spec, (full,), {}) is None:
            self.items.setdefault(("missing", full), Missing(full, Place("module", full)))
        return interesting(value)


def _peek(owner: Any, name: str) -> Any:
    """An attribute's value, with none of the owner's code run."""
    if is_a(owner, Instance | FrameOf):
        return ABSENT
    held = vars(owner) if is_a(owner, ModuleType) else dict_of(owner)
    if held is not None and name in held:
        return held[name]
    raw = class_entry(owner if is_a(owner, type) else type(owner), name)
    if is_a(raw, types.MemberDescriptorType):
        try:
            return raw.__get__(owner)
        except AttributeError:
            return ABSENT
    return ABSENT if raw is ABSENT or hasattr(type(raw), "__get__") else raw
