"""Bytecode: names of instructions by what they do; sources of values joined, and of what operators make of them."""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator
from types import CodeType
from typing import Any

from bridge.guards.flow import DataFlow

__all__ = ["BUILDS", "COMPARES", "DEREFS", "ENDS", "IDLE", "JOINS", "JUMPS", "NEW", "NEW_ATTR", "NOTHING", "NO_PLACES"]
__all__ += ["NULL", "NULL_BEHIND", "OLD_OPERATOR", "SYMBOLS", "Lookups", "argument_is_subscript", "computed"]
__all__ += ["handlers", "held_in", "joined", "result_of", "without_locals"]

NOTHING: frozenset = frozenset()
NULL = frozenset((("null",),))

NO_PLACES = ("null", "const", "local")
DEREFS = {"LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_CLOSURE"}
BUILDS = {"BUILD_TUPLE", "BUILD_LIST", "BUILD_SET"}
IDLE = set("NOP RESUME CACHE EXTENDED_ARG KW_NAMES PRECALL COPY_FREE_VARS MAKE_CELL NOT_TAKEN".split())
JOINS = {"LIST_EXTEND", "SET_UPDATE", "DICT_UPDATE", "DICT_MERGE", "LIST_APPEND", "SET_ADD"}
ENDS = {"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE", "JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_ABSOLUTE"}
ENDS |= {"JUMP_BACKWARD_NO_INTERRUPT", "INTERPRETER_EXIT"}
OLD_OPERATOR = {"MULTIPLY": "mul", "MATRIX_MULTIPLY": "matmul", "FLOOR_DIVIDE": "floordiv", "TRUE_DIVIDE": "truediv"}
OLD_OPERATOR |= {"POWER": "pow", "MODULO": "mod", "SUBTRACT": "sub"}
SYMBOLS = {"+": "add", "-": "sub", "*": "mul", "/": "truediv", "//": "floordiv", "%": "mod", "**": "pow", "@": "matmul"}
SYMBOLS |= {"&": "and", "|": "or", "^": "xor", "<<": "lshift", ">>": "rshift"}
COMPARES = {"<": "lt", "<=": "le", "==": "eq", "!=": "ne", ">": "gt", ">=": "ge"}
JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))
NEW = sys.version_info >= (3, 11)
NEW_ATTR = sys.version_info >= (3, 12)
NULL_BEHIND = sys.version_info >= (3, 13)


def joined(*sets: frozenset) -> frozenset:
    return frozenset().union(*sets)


def without_locals(value: frozenset) -> frozenset:
    return frozenset(source for source in value if source[0] != "local")


def computed(symbol: str, left: frozenset, right: frozenset) -> frozenset:
    """The result of an operator on texts and numbers that may be known: a path, a key."""
    plain = ("const", "global", "attr", "arg", "cell", "op", "local", "var")
    pairs = [(a, b) for a in left if a[0] in plain for b in right if b[0] in plain]
    if symbol not in ("+", "%", "-", "*") or len(pairs) > 2:
        return NOTHING
    return frozenset(("op", symbol, a, b) for a, b in pairs)


def argument_is_subscript(each: Any) -> bool:
    """Whether a binary operator is ``a[b]``, as it is from Python 3.14 on."""
    return str(each.argrepr) == "[]"


def handlers(code: CodeType, instructions: list[Any]) -> Iterator[tuple[int, int]]:
    """The beginnings of exception handlers and the height of the stack there."""
    entries = getattr(dis.Bytecode(code), "exception_entries", ()) if sys.version_info >= (3, 11) else ()
    for entry in entries:
        yield entry.target, entry.depth + bool(entry.lasti) + 1


def result_of(instruction: Any) -> frozenset:
    """What an instruction gives, by its offset."""
    return frozenset((("result", instruction.offset),))


def held_in(value: frozenset) -> frozenset:
    """What a container holds that a value was put into."""
    return frozenset(("held", source) for source in value if source[0] != "const")


class Lookups:
    """What a function looks up of values, noted in its flow.

    Attributes:
        flow: what was read so far.
        derived: by the offset of an operator, the sources of its operands.
    """

    def __init__(self) -> None:
        self.flow = DataFlow()
        self.derived: dict[int, frozenset] = {}

    def _of(self, kind: str, value: frozenset, *more: Any) -> frozenset:
        """The sources ``(kind, source, *more)`` of each, which are read."""
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
        """Notes results that decide something, and what they were computed of."""
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
                known = which[0] in ("const", "arg", "global", "attr", "cell", "item", "result", "called", "var")
                made = ("item", source, which) if known else ("each", source)
                self.flow.reads[made] = None
                found.add(made)
        return frozenset(found)

    def _each(self, value: frozenset) -> frozenset:
        return self._of("each", frozenset(source for source in value if source[0] not in ("const", "made")))

    def _parts(self, value: frozenset) -> frozenset:
        """What the result of an operator may hold of an operand: the entries of a list that another is added to."""
        return frozenset(
            ("held", ("each", source)) for source in value if source[0] in ("attr", "global", "cell", "item", "var")
        )

    def _operator(self, each: Any, name: str) -> None:
        if name == "BINARY_OP":
            symbol = str(each.argrepr)
            operator = SYMBOLS.get(symbol.rstrip("=") if symbol not in SYMBOLS else symbol)
            inplace = symbol.endswith("=")
        else:
            word = name.partition("_")[2]
            operator, inplace = OLD_OPERATOR.get(word, word.lower()), name.startswith("INPLACE")
        if operator:
            self.flow.operators |= {f"__{operator}__", f"__r{operator}__"} | (
                {f"__i{operator}__"} if inplace else set()
            )
