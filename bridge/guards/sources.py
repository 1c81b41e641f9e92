"""Values of sources: (a running function, a source) → the objects that it may be; notes the reads on the way."""

from __future__ import annotations

import dis
import functools
import operator
import sys
import types
import weakref
from collections.abc import Iterable
from contextlib import suppress
from importlib.util import find_spec
from types import FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch

from bridge.guards.bytecode import DataFlow, Source, is_local
from bridge.guards.insides import Insides
from bridge.guards.kinds import CONTAINERS, PLAIN, answer_of, is_a, key_of
from bridge.guards.objects import (
    ABSENT,
    ANY,
    FrameOf,
    Instance,
    class_entry,
    classes_in,
    dict_of,
    identity_of,
    interesting,
    is_changeable,
)
from bridge.guards.watched import Answer, Place

__all__ = ["MOST_RESULTS", "Frame", "Sources"]

_MOST_PASSES = 5000
"""The limit of passes over a function's assignments; a linked list takes as many as it has nodes."""
MOST_RESULTS = 256
"""The objects, and the plain values, that are followed one by one for each call instruction."""
_TOLD = (str, int, float, type)
"""Types of values whose text is ``str(value)`` in an f-string; of a class, its name and module, which are noted."""
_NAMES = ("__name__", "__qualname__", "__module__")
_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "%": operator.mod}


class Held(NamedTuple):
    """Points-to sets of a variable, by identity: its possible values, and the possible contents of these containers."""

    values: dict[Any, Any]
    inside: dict[Any, Any]


class Variables:
    """Assigned variables.

    Attributes:
        held: possible values by name. ``shown``: the part of them that the current pass follows.
        busy: variables whose plain values are being computed.
    """

    def __init__(self, names: Iterable[str]):
        self.held = {name: Held({}, {}) for name in names}
        self.shown = self.held
        self.busy: set[str] = set()


class Calls:
    """The calls of a running function, by their offsets in its code.

    Attributes:
        results: objects that a call may give: the results of Python functions, possible results of functions in C.
        plain: plain results of Python functions.
        python, heard: offsets of calls of Python functions, and of functions in C that the profiler reported.
        unknown: offsets of calls of functions in C, which may give something else than these results.
        fresh: offsets of calls whose results have not been followed yet.
        made: objects that the analysis makes itself, by class and arguments: the same ones each time it looks.
    """

    def __init__(self) -> None:
        self.results: dict[int, dict[Any, Any]] = {}
        self.plain: dict[int, list[Any]] = {}
        self.python, self.heard, self.unknown, self.fresh = (set[int]() for _ in range(4))
        self.made: dict[tuple, Any] = {}

    def bound(self, kind: type, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """The object that a class makes of arguments that it binds (``functools.partial``); ``None`` if it raises."""
        given, plain = (*args, *kwargs.values()), PLAIN - {slice}  # which have a hash
        key = kind, len(args), *kwargs, *(key_of(each) if type(each) in plain else identity_of(each) for each in given)
        with suppress(TypeError):  # forward is about to raise it, or passes another argument than the known one
            if kind is weakref.ref:  # Python keeps one for each object; with a callback, forward's would run twice
                return kind(args[0])
            if key not in self.made:
                self.made[key] = kind(*args, **kwargs)
        return self.made.get(key)


class Frame:
    """A running function.

    Attributes:
        args, cells: its arguments and closure variables at its begin.
        calls: the calls that it has made.
        over: whether it has returned. ``writes``: the world's count of possible writes when it was last followed.
        locals: its variables, while a function in C is about to be called.
    """

    def __init__(self, frame: FrameType, flow: DataFlow, args: dict[str, Any], cells: dict[str, Any]):
        self.flow, self.args, self.cells, self.code = flow, args, cells, frame.f_code
        self.globals, self.builtins, self.frame = frame.f_globals, frame.f_builtins, frame
        self.calls = Calls()
        self.memo: dict[Source, list[Any]] = {}
        self.locals: dict[str, Any] = {}
        self.variables = Variables(flow.variables)
        self.over, self.writes = False, 0

    @property
    def where(self) -> str:
        return f"{self.code.co_filename}:{self.code.co_firstlineno}"


class Sources(Insides):
    """Data-flow evaluation: sources in the code of running functions → the objects that they may be."""

    def _constants(self, frame: Frame, sources: Iterable[Source]) -> list[Any]:
        """The values of sources, including plain ones (numbers, strings), as for keys and arguments of C functions."""
        found: dict[Any, Any] = {}
        for value in (value for source in sources for value in self._plain(frame, source)):
            plain = type(value) in PLAIN and type(value) is not slice
            found.setdefault(value if plain else ("object", id(value)), value)
        return list(found.values())

    def _plain(self, frame: Frame, source: Source) -> list[Any]:
        kind = source[0]
        if kind == "const":
            return [source[1]]
        if kind == "local":
            return [frame.locals[source[1]]] if source[1] in frame.locals else []
        if kind in ("arg", "cell"):
            value = (frame.args if kind == "arg" else frame.cells).get(source[1], ABSENT)
            return [] if value is ABSENT else [ANY if is_a(value, Instance) else value]
        if kind == "computed" and source[1] not in frame.calls.python:  # a function in C gives the call's result
            return [ANY] if frame.over or source[1] in frame.calls.heard else []
        if kind == "made":
            return [ANY]
        if kind == "global":
            return next(([space[source[1]]] for space in (frame.globals, frame.builtins) if source[1] in space), [])
        if kind == "attr":
            found = [_peek(owner, source[2]) for owner in self._plain(frame, source[1])]
            return [value for value in found if value is not ABSENT]
        if kind == "item":
            found = []
            for owner in self._plain(frame, source[1]):
                if owner is ANY:
                    found.append(ANY)
                for key in self._constants(frame, (source[2],)) if type(owner) in (dict, list, tuple) else ():
                    try:
                        found.append(ANY if key is ANY else owner[key])
                    except (KeyError, IndexError, TypeError):
                        continue
            return found
        if kind == "op":
            return self._operated(frame, *source[1:])
        if kind == "text":
            found, by = self._plain(frame, source[2]), self._plain(frame, source[1])
            told = [str(each) if by == [str] and type(each) in _TOLD else ANY for each in found]
            if source[2][0] == "result" and source[2][1] in frame.calls.unknown:
                return [*told, ANY]
            return told or ([] if is_local(source) or _is_without_call(frame, source[2]) else [ANY])
        if kind == "var":
            busy, known = frame.variables.busy, (*source, "constants")
            if source[1] in busy:
                return []
            memo = {} if busy or frame.locals else frame.memo  # inside of another variable it is a part
            if known not in memo:
                busy.add(source[1])
                memo[known] = self._constants(frame, frame.flow.variables[source[1]])
                busy.remove(source[1])
            return memo[known]
        if kind == "result":
            return [*frame.calls.plain.get(source[1], ()), *frame.calls.results.get(source[1], {}).values()]
        return self._values(frame, source)

    def _operated(self, frame: Frame, symbol: str, left: Source, right: Source) -> list[Any]:
        found, kinds = [], (str, bytes, int, float)
        lefts, rights = self._plain(frame, left), self._plain(frame, right)
        if any(each is ANY for each in (*lefts, *rights)):
            return [ANY]
        for a in lefts:
            for b in rights if type(a) in kinds else ():
                if type(b) in kinds or (symbol == "%" and type(b) is tuple):
                    with suppress(TypeError, ValueError):
                        found.append(_OPERATORS[symbol](a, b))
        return found

    def _values(self, frame: Frame, source: Source) -> list[Any]:
        """The objects that a source may be; notes the reads on the way."""
        found = frame.memo.get(source)
        if found is None:
            frame.memo[source] = []  # ends a recursion
            found = frame.memo[source] = self._find(frame, source)
        return found

    def _find(self, frame: Frame, source: Source) -> list[Any]:
        kind, of = source[0], source[1] if len(source) > 1 else None
        if kind in ("arg", "cell"):
            return interesting((frame.args if kind == "arg" else frame.cells).get(of, ABSENT))
        if kind == "global":
            value = self.name(frame.globals, of, Place("global", of))
            if value is ABSENT:
                value = self.name(frame.builtins, of, Place("builtin", of))
            return interesting(value)
        if kind == "attr":
            return [value for owner in self._values(frame, of) for value in self.attribute(owner, source[2])]
        if kind == "matched":
            names = [(owner, name) for owner in self._values(frame, of) for name in self._match_args(owner)]
            return [value for owner, name in names for value in self.attribute(owner, name)]
        if kind == "caught":
            caught = {each for value in self._constants(frame, (of,)) for each in classes_in(value)}
            raised = ((each.kind if is_a(each, Instance) else type(each), each) for each in self.raised.values())
            found = [each for kind, each in raised if not caught.isdisjoint(kind.__mro__)]
            return [*found, *(Instance(each) for each in caught if is_changeable(each))]
        if kind == "import":
            return self._import(frame, *source[1:])
        if kind == "result":
            return [*frame.calls.results.get(of, {}).values()]
        if kind == "var":
            held = frame.variables.shown[of]
            return [*held.values.values(), *(held.inside[key] for key in held.inside if key not in held.values)]
        if kind == "receiver":
            owners = [each[1] for each in self._expanded(frame, [of]) if each[0] == "attr"]
            return [value for owner in owners for value in self._values(frame, owner)]
        if kind == "held" or (kind in ("each", "item", "member") and of[0] == "held"):
            return self._values(frame, of)
        if kind == "super":
            first = next(iter(frame.args.values()), None)
            one = frame.cells.get("__class__")
            found = is_a(one, type) and (is_a(first, one) or (is_a(first, type) and issubclass(first, one)))
            return self.attribute(super(one, first), of) if found else []
        if kind in ("each", "item", "member"):
            owners, made = self._values(frame, of), []
            if of[0] == "var":
                owners, made = ([*held.values()] for held in frame.variables.shown[of[1]])
            elif self._may_hold(frame, of):
                made = owners
            keys = [] if kind == "each" else self._keys(frame, source[2])
            if not keys and kind != "each" and (not frame.over or _is_without_call(frame, source[2])):
                return []  # the key is not there yet, or another source gives it
            for owner in owners if kind == "member" else ():
                self.member(owner, keys or [ANY], frame.where)
            if kind == "member":
                return []
            if not keys:
                return [*made, *(value for owner in owners for value in self._each(frame, owner))]
            return [*made, *(value for owner in owners for key in keys for value in self.entry(owner, key))]
        return []

    def _expanded(self, frame: Frame, sources: Iterable[Source]) -> list[Source]:
        """Sources, with each variable replaced by the sources of its assigned values."""
        found, waiting = dict.fromkeys(sources), list(sources)
        while waiting:
            source = waiting.pop()
            if source[0] == "var":
                new = [each for each in frame.flow.variables[source[1]] if each not in found]
                found.update(dict.fromkeys(new))
                waiting += new
        return [source for source in found if source[0] != "var"]

    def _may_hold(self, frame: Frame, source: Source) -> bool:
        """Whether a source's known values are its possible contents at any depth: a call's result or a part of it."""
        while source[0] in ("item", "each"):
            source = source[1]
        if source[0] == "var":
            return bool(frame.variables.shown[source[1]].inside)
        return source[0] in ("result", "held")

    def _assigned(self, frame: Frame, flow: DataFlow) -> None:
        """Follows assignments to a fixpoint: each pass follows the new values, the last one all values."""
        everything, passes, nothing = True, 0, dict.fromkeys(frame.variables.held, Held({}, {}))
        while flow.variables:
            if (passes := passes + 1) > _MOST_PASSES:
                told = "leads from object to object, more of them than are followed"
                self.refuse(f"a variable of {frame.code.co_name}()", frame.where, told, "do it outside of forward")
                break
            known = len(self._known)
            found = {name: self._new(frame, name, sources) for name, sources in flow.variables.items()}
            for source in [each for each in frame.memo if _varies(each) or known < len(self._known)]:
                del frame.memo[source]  # the other sources would give the same once more
            grown = any(each.values or each.inside for each in found.values())
            if not grown and everything:
                break
            for name, new in found.items():
                frame.variables.held[name].values.update(new.values)
                frame.variables.held[name].inside.update(new.inside)
            everything = not grown
            frame.variables.shown = frame.variables.held if everything else nothing | found
        frame.variables.shown = frame.variables.held

    def _new(self, frame: Frame, name: str, sources: Iterable[Source]) -> Held:
        """The values assigned to a variable that were not known yet."""
        new, known = Held({}, {}), frame.variables.held[name]
        for source in sources:
            if source[0] == "var":
                held = frame.variables.shown[source[1]]
                values, inside = held.values, held.inside
            else:
                found = {identity_of(value): value for value in self._values(frame, source)}
                values = {} if source[0] == "held" else found
                inside = found if self._may_hold(frame, source) else {}
            new.values.update((key, values[key]) for key in values if key not in known.values)
            new.inside.update((key, inside[key]) for key in inside if key not in known.inside)
        return new

    def _given(self, frame: Frame, sources: Iterable[Source]) -> list[Any]:
        """The possible values of an argument: objects, whose reads are noted, and plain values."""
        exact = [value for each in sources if is_local(each) for value in self._plain(frame, each)]
        if exact and type(exact[0]) in PLAIN:
            return exact[:1]
        found = {id(value): value for value in self._constants(frame, sources)}
        is_any = found.pop(id(ANY), None) is not None and not exact
        keeps = is_any and bool(found) and all(type(value) in PLAIN for value in found.values())
        for source in sources:
            found.update({id(value): value for value in self._values(frame, source)})
        return [*found.values(), *([ANY] if keeps else [])]

    def _identity(self, frame: Frame, source: Source, is_compared: bool = True) -> None:
        """Notes that a value is compared by identity, or that its identity is read.

        Guards compare a function argument's code; :attr:`World.kin` tells functions of equal code apart.
        """
        values = self._given(frame, (source,))
        self.tensors.identities |= {self.inputs[id(value)] for value in values if id(value) in self.inputs}
        for value in values:
            if is_compared and type(value) is FunctionType:
                self.told_apart |= any(value is each for each in self.passed)
            elif is_a(value, CONTAINERS):
                self.told[type(value)].setdefault((frame.code, source, is_compared), (value, frame.where))
            else:
                self.identity_of_passed(value, frame.where)
        known = [self.original(value) for value in values if value is not None and type(value) is not bool]
        self.identical.update((id(value), value) for value in known)
        for value in values:
            if is_a(value, torch.Tensor) and id(value) not in self.inputs and self.knows(value):
                self.tensors.others[id(value)] = value

    def _written(self, owner: Any, name: str) -> None:
        """Notes an attribute before it is set."""
        if is_a(owner, torch.Tensor) and self.knows(owner):
            own = self.original(owner)
            place = Place("attribute", name, f" of {self.place(own)}")
            if own is not owner and not hasattr(torch.Tensor, name):  # ``data``, ``grad``: capture sees these itself
                reason = "sets an attribute of a tensor of the module's; a compiled call does not"
                self.refuse(str(place), "forward", reason, "keep it in an attribute of the module")
            self.name(own.__dict__, name, place)
        else:
            self.attribute(owner, name)
            self.written.add(("name", id(dict_of(self.original(owner))), name))

    def _keys(self, frame: Frame, source: Source) -> list[Any]:
        """The possible values of a key; none where a function in C makes it."""
        sources = self._expanded(frame, [source])
        if self.passed:
            for value in self._given(frame, sources):
                self.identity_of_passed(value, frame.where)
        python = frame.calls.python
        return self._constants(frame, [each for each in sources if each[0] != "result" or each[1] in python])

    def _result(self, frame: Frame, place: int, value: Any) -> None:
        """Notes a possible result of a call."""
        value = FrameOf.of(value) if is_a(value, FrameType) else value
        kept, known = self._kept(value), frame.calls.results.setdefault(place, {})
        if (key := identity_of(kept)) in known:
            return
        if len(known) < MOST_RESULTS:
            known[key] = kept
            frame.calls.fresh.add(place)
        else:
            (self.all if is_a(kept, torch.nn.Module) else self.deep)(kept)

    def _kept(self, value: Any) -> Any:
        """A value as it is kept: of the call's own tensors only the class, so that loop steps give the same."""
        if type(value) is tuple and not self.knows(value):
            kept = tuple(map(self._kept, value))
            return kept if any(one is not other for one, other in zip(kept, value, strict=True)) else value
        if type(value) is FunctionType:
            return self.cached_function(value)
        return Instance(type(value)) if is_a(value, torch.Tensor) and not self.knows(value) else value

    def _match_args(self, owner: Any) -> Iterable[str]:
        """The attributes that a pattern of an object's classes may read by position."""
        kinds = [each for each in type(owner).__mro__ if type(vars(each).get("__match_args__")) is tuple]
        for each in kinds:
            self.class_name(each, "__match_args__")
        return dict.fromkeys(name for each in kinds for name in vars(each)["__match_args__"])

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
            self.items.setdefault(("missing", full), Answer(find_spec, (full,), {}, Place("module", full)))
        return interesting(value)


def _is_without_call(frame: Frame, source: Source) -> bool:
    """Whether a source is the result of a property, or in it, where an attribute was read without a call."""
    while source[0] == "attr":
        source = source[1]
    if source[0] != "result" or source[1] in frame.calls.python:
        return False
    return dis.opname[frame.code.co_code[source[1]]] in ("LOAD_ATTR", "LOAD_METHOD")


@functools.cache
def _varies(source: Source) -> bool:
    """Whether the values of a source depend on variables."""
    return source[0] == "var" or any(type(each) is tuple and each and _varies(each) for each in source[1:])


def _peek(owner: Any, name: str) -> Any:
    """An attribute's value, read without running the owner's code."""
    if is_a(owner, Instance | FrameOf):
        return ABSENT
    if owner is ANY:
        return ANY
    held = vars(owner) if is_a(owner, ModuleType) else dict_of(owner)
    if held is not None and name in held:
        return held[name]
    if is_a(owner, type) and name in _NAMES:
        return getattr(owner, name)
    raw = class_entry(owner if is_a(owner, type) else type(owner), name)
    if name == "__class__" and raw is object.__dict__["__class__"]:
        return type(owner)
    if is_a(raw, types.MemberDescriptorType):
        try:
            return raw.__get__(owner)
        except (AttributeError, TypeError):  # an empty slot; a class, whose objects have it
            return ABSENT
    if is_a(raw, types.GetSetDescriptorType):
        return ANY
    return ABSENT if raw is ABSENT or hasattr(type(raw), "__get__") else raw
