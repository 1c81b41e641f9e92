"""Bytecode: names of instructions by what they do; sources of values joined, and of what operators make of them."""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator
from types import CodeType
from typing import Any

from bridge.guards.flow import Source

__all__ = ["BUILDS", "COMPARES", "DEREFS", "ENDS", "FLAGGED", "IDLE", "JOINS", "JUMPS", "NEW", "NEW_ATTR", "NOTHING"]
__all__ += ["NOWHERE", "NO_PLACES", "NULL", "NULL_BEHIND", "OLD_OPERATOR", "SYMBOLS", "UNKNOWN"]
__all__ += ["argument_is_subscript", "computed", "handlers", "joined", "without_locals"]

UNKNOWN: Source = ("unknown",)
NOWHERE = frozenset((UNKNOWN,))
NOTHING: frozenset = frozenset()
NULL = frozenset((("null",),))

NO_PLACES = ("null", "const", "unknown", "local")
DEREFS = {"LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_CLOSURE"}
BUILDS = {"BUILD_TUPLE", "BUILD_LIST", "BUILD_SET"}
IDLE = set("NOP RESUME CACHE EXTENDED_ARG KW_NAMES PRECALL COPY_FREE_VARS MAKE_CELL NOT_TAKEN".split())
JOINS = {"LIST_EXTEND", "SET_UPDATE", "DICT_UPDATE", "DICT_MERGE", "LIST_APPEND", "SET_ADD"}
ENDS = {"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE", "JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_ABSOLUTE"}
ENDS |= {"JUMP_BACKWARD_NO_INTERRUPT", "INTERPRETER_EXIT"}
OLD_OPERATOR = {"MULTIPLY": "mul", "MATRIX_MULTIPLY": "matmul", "FLOOR_DIVIDE": "floordiv", "TRUE_DIVIDE": "truediv"}
OLD_OPERATOR |= {"POWER": "pow", "MODULO": "mod", "SUBTRACT": "sub"}
SYMBOLS = {
    "+": "add",
    "-": "sub",
    "*": "mul",
    "/": "truediv",
    "//": "floordiv",
    "%": "mod",
    "**": "pow",
    "@": "matmul",
}
SYMBOLS |= {"&": "and", "|": "or", "^": "xor", "<<": "lshift", ">>": "rshift"}
COMPARES = {"<": "lt", "<=": "le", "==": "eq", "!=": "ne", ">": "gt", ">=": "ge"}
JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))
NEW = sys.version_info >= (3, 11)
FLAGGED = sys.version_info >= (3, 11)
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
