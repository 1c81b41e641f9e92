"""Bytecode tables and data-flow records: instruction names by effect; a code object's reads of outside state."""

from __future__ import annotations

import dis
import sys
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from types import CodeType
from typing import Any

__all__ = ["BUILDS", "DEREFS", "ENDS", "IDLE", "JOINS", "JUMPS", "NEW", "NEW_ATTR", "NOTHING", "NO_PLACES"]
__all__ += ["NULL", "NULL_BEHIND", "CallSite", "DataFlow", "Lookups", "Source"]
__all__ += ["PLAIN_SOURCES", "PUTS", "RESULTS", "computed", "handlers", "held_in", "inner_stores", "joined", "put_by"]
__all__ += ["is_local", "result_of", "root_of", "text_of", "without_locals"]

Source = tuple
"""``(kind, ...)``; :class:`bridge.guards.sources.Sources` finds the values of each kind."""


@dataclass(frozen=True)
class CallSite:
    """A call instruction.

    Attributes:
        function: sources of the called object.
        args, kwargs: the sources of each argument; ``None``: not known one by one (``f(*args)``).
        spread: the sources of all arguments together, in that case.
    """

    function: frozenset
    args: tuple[frozenset, ...] | None
    kwargs: tuple[tuple[str, frozenset], ...] = ()
    spread: frozenset = frozenset()

    @property
    def arguments(self) -> frozenset:
        return self.spread.union(*(self.args or ()), *(each for _, each in self.kwargs))


@dataclass
class DataFlow:
    """The reads, calls and writes of a code object.

    Attributes:
        reads: sources that are looked up: names, attributes, items.
        variables: for each assigned local, the sources of its values.
        wholes: sources whose contents are looked at: iterated, compared or shown (true), tested, handed to an operator.
        writes: ``("attr", source of the object, name)``, ``("item", source of the container, sources of the key)``,
            ``("global", name)``, ``("cell", name)``.
        identities: sources that are compared by ``is``.
        iterated: sources whose next values are taken, if they are iterators.
        relations: values and the classes that ``match`` and ``except`` compare them with.
        compared: results of calls and operators that are compared.
        by_results: whether an entry is looked up by a key that another function returns, or an exception is caught.
    """

    reads: dict[Source, None] = field(default_factory=dict)
    variables: dict[str, dict[Source, None]] = field(default_factory=dict)
    wholes: dict[Source, bool] = field(default_factory=dict)
    calls: dict[int, CallSite] = field(default_factory=dict)
    writes: dict[tuple, None] = field(default_factory=dict)
    identities: dict[Source, None] = field(default_factory=dict)
    iterated: dict[Source, None] = field(default_factory=dict)
    compared: set[Source] = field(default_factory=set)
    relations: dict[int, tuple[frozenset, frozenset]] = field(default_factory=dict)
    by_results: bool = False
    offsets: Sequence[int] = ()
    _places: dict[Any, frozenset[int]] = field(default_factory=dict)
    _parts: dict[int, DataFlow] = field(default_factory=dict)

    def places(self, source: Any) -> frozenset[int]:
        """The offsets of the calls whose results a source or a write depends on."""
        if source not in self._places:
            found, waiting, seen = set(), [source], {source}
            while waiting:
                each = waiting.pop()
                if type(each) is tuple and each and each[0] == "result":
                    found.update(each[1:])
                    continue
                inner = self.variables.get(each[1], ()) if type(each) is tuple and each[:1] == ("var",) else each
                new = [part for part in inner if type(part) in (tuple, frozenset) and part not in seen]
                seen.update(new)
                waiting += new
            self._places[source] = frozenset(found)
        return self._places[source]

    def about(self, place: int) -> DataFlow:
        """The part of the flow that depends on the result of the call at one offset."""
        if place not in self._parts:
            part = self._parts[place] = DataFlow()
            for name in ("reads", "wholes", "identities", "iterated", "writes"):
                held = getattr(self, name)
                setattr(part, name, {source: held[source] for source in held if place in self.places(source)})
            for name, held in self.variables.items():
                if found := {source: None for source in held if place in self.places(source)}:
                    part.variables[name] = found
            part.relations = {at: of for at, of in self.relations.items() if place in self.places(of)}
            used = {at: (*call.function, *call.arguments) for at, call in self.calls.items()}
            part.calls = {at: self.calls[at] for at in used if any(place in self.places(source) for source in used[at])}
        return self._parts[place]

    def at(self, last: int) -> int:
        """The offset of the current instruction of a frame; ``f_lasti`` may point at an inline cache behind it."""
        return self.offsets[bisect_right(self.offsets, last) - 1]


NOTHING: frozenset = frozenset()
NULL = frozenset((("null",),))

NO_PLACES = ("null", "const", "local")
DEREFS = {"LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_CLOSURE"}
BUILDS = {"BUILD_TUPLE", "BUILD_LIST", "BUILD_SET"}
IDLE = set("NOP RESUME CACHE EXTENDED_ARG KW_NAMES PRECALL COPY_FREE_VARS MAKE_CELL NOT_TAKEN".split())
JOINS = {"LIST_EXTEND", "SET_UPDATE", "DICT_UPDATE", "DICT_MERGE", "LIST_APPEND", "SET_ADD"}
ENDS = {"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE", "JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_ABSOLUTE"}
ENDS |= {"JUMP_BACKWARD_NO_INTERRUPT", "INTERPRETER_EXIT"}
JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))
NEW = sys.version_info >= (3, 11)
NEW_ATTR = sys.version_info >= (3, 12)
NULL_BEHIND = sys.version_info >= (3, 13)


def joined(*sets: frozenset) -> frozenset:
    """The union of sets."""
    return frozenset().union(*sets)


@cache
def is_local(source: Source) -> bool:
    """Whether a source is a variable's value at this instruction, or is computed from one."""
    return source[0] == "local" or (source[0] in ("op", "text") and any(map(is_local, source[2:])))


def without_locals(value: frozenset) -> frozenset:
    """The sources that are not computed from local variables."""
    return frozenset(source for source in value if not is_local(source))


def _of_locals(value: frozenset) -> frozenset:
    return frozenset(filter(is_local, value)) or value


def computed(symbol: str, left: frozenset, right: frozenset) -> frozenset:
    """The sources of a binary operator's result on known strings and numbers (a path, a key)."""
    made = NOTHING
    for chosen in (_of_locals, without_locals) if symbol in ("+", "%", "-", "*") else ():
        sides = [[each for each in chosen(value) if each[0] in _COMPUTES] for value in (left, right)]
        if len(sides[0]) * len(sides[1]) <= 2:
            made |= {("op", symbol, *pair) for pair in product(*sides)}
    return made


def text_of(value: frozenset, by: Source = ("const", str)) -> frozenset:
    """The sources of a value's text; ``by``: the source of the function that makes it."""
    chosen = (each for choose in (_of_locals, without_locals) for each in choose(value))
    return frozenset(("text", by, each) for each in chosen if each[0] in _SHOWN)


def handlers(code: CodeType) -> Iterator[tuple[int, int]]:
    """The beginnings of exception handlers and the height of the stack there."""
    entries = getattr(dis.Bytecode(code), "exception_entries", ()) if sys.version_info >= (3, 11) else ()
    for entry in entries:
        yield entry.target, entry.depth + bool(entry.lasti) + 1


def result_of(instruction: Any) -> frozenset:
    """The source of an instruction's result, by its offset."""
    return frozenset((("result", instruction.offset),))


def held_in(value: frozenset) -> frozenset:
    """The sources of a container's entries after a value was put into it."""
    return frozenset(("held", source) for source in value if source[0] != "const")


PLAIN_SOURCES = ("const", "global", "attr", "arg", "cell", "item", "op", "text", "var")
_COMPUTES = ("const", "global", "attr", "arg", "cell", "op", "text", "var", "local")
_SHOWN = (*_COMPUTES, "result")
RESULTS = ("result", "each", "held")
PUTS = frozenset("append appendleft add insert extend update setdefault put __setitem__".split())


def root_of(source: Source) -> Source:
    """The source of the object that a chain of attributes and entries begins with."""
    while source[0] in ("attr", "item"):
        source = source[1]
    return source


def inner_stores(code: CodeType) -> set[str]:
    """The variables that functions inside of a function assign."""
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    instructions = (each for one in inner for each in dis.get_instructions(one))
    own = {each.argval for each in instructions if each.opname == "STORE_DEREF"}
    return own.union(*map(inner_stores, inner))


def put_by(each: Any) -> str:
    """The name under which a value is kept that an instruction puts into an object: its attribute, or any entry."""
    if each.opname == "STORE_ATTR":
        return f".{each.argval}"
    puts = each.opname in ("LOAD_METHOD", "LOAD_ATTR") and each.argval in PUTS
    return "[]" if puts or each.opname == "STORE_SUBSCR" else ""


class Lookups:
    """Collects the lookups of a function in its flow.

    Attributes:
        flow: the reads so far.
        derived: by the offset of an operator, the sources of its operands.
    """

    def __init__(self) -> None:
        self.flow = DataFlow()
        self.derived: dict[int, frozenset] = {}

    def _of(self, kind: str, value: frozenset, *more: Any) -> frozenset:
        """Notes a read ``(kind, source, *more)`` of each source; returns these sources."""
        found = set()
        for source in value:
            if source[0] not in ("local", "null"):
                made = (kind, source, *more)
                self.flow.reads[made] = None
                found.add(made)
        return frozenset(found)

    def _whole(self, value: frozenset, compared: bool = False) -> None:
        for source in value:
            if source[0] not in NO_PLACES:
                self.flow.wholes[source] = compared or self.flow.wholes.get(source, False)

    def _iterated(self, value: frozenset) -> None:
        self._whole(value)
        self.flow.iterated.update((source, None) for source in value if source[0] not in NO_PLACES)

    def _read(self, *source: Any) -> frozenset:
        self.flow.reads[source] = None
        return frozenset((source,))

    def _compared(self, value: frozenset) -> None:
        """Notes compared results, and the results that they were computed from."""
        for source in value - self.flow.compared:
            if source[0] == "result":
                self.flow.compared.add(source)
                self._compared(self.derived.get(source[1], NOTHING))

    def _item(self, owner: frozenset, key: frozenset, offset: int | None) -> frozenset:
        found = set() if offset is None else {("result", offset)}
        for source in owner:
            if source[0] == "null":
                continue
            for which in key or NULL:
                known = which[0] in ("const", "arg", "global", "attr", "cell", "item", "result", "var")
                made = ("item", source, which) if known else ("each", source)
                self.flow.reads[made] = None
                found.add(made)
        return frozenset(found)

    def _each(self, value: frozenset) -> frozenset:
        return self._of("each", frozenset(source for source in value if source[0] not in ("const", "made")))

    def _parts(self, value: frozenset) -> frozenset:
        """The operand's entries that an operator's result may hold (``list + list``)."""
        return frozenset(
            ("held", ("each", source)) for source in value if source[0] in ("attr", "global", "cell", "item", "var")
        )
