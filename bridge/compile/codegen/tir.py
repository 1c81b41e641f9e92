"""TIR helpers: statements in sequence, counted loops, functions that are loops from the start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from tvm import tirx
from tvm.tirx import Buffer, Expr, For, ForKind, PrimFunc, SeqStmt, Stmt, Var

__all__ = ["INDEX", "LOOPS_ATTR", "SHARED_ATTR", "Scope", "const", "loop", "loop_function", "sequence"]

INDEX = "int64"
"""Element type of indices in functions that serve every shape."""

LOOPS_ATTR = "bridge.loops"
"""Marks PrimFuncs made of loops from the start: they need fewer passes than those with schedulable blocks."""

SHARED_ATTR = "bridge.shared"
"""Marks PrimFuncs that serve every shape: built by themselves, and cached for the next program when no one uses them.
"""


def const(number: int) -> Expr:
    """An index known at compile time."""
    return tirx.const(number, INDEX)


def sequence(stmts: Sequence[Stmt]) -> Stmt:
    """One statement that runs ``stmts`` in order."""
    return stmts[0] if len(stmts) == 1 else SeqStmt(list(stmts))


class _Collects(Protocol):
    stmts: list[Stmt]


class Scope:
    """Statements of one loop body, in order."""

    def __init__(self) -> None:
        self.stmts: list[Stmt] = []

    def name(self, value: Expr, hint: str) -> Var:
        """A variable of this scope that holds an index."""
        var = Var(hint, INDEX)
        self.stmts.append(tirx.Bind(var, value))
        return var

    def add(self, *stmts: Stmt) -> None:
        """Appends statements."""
        self.stmts += stmts

    @property
    def body(self) -> Stmt:
        """All of them as one statement."""
        return sequence(self.stmts)


Body = TypeVar("Body", bound=_Collects)


def loop(
    extent: Expr | int,
    body: Callable[[Body, Var], None],
    kind: ForKind = ForKind.SERIAL,
    scope: Callable[[], Body] = Scope,
) -> Stmt:
    """``for i in range(extent)``: ``body(scope, i)`` adds the statements of one turn to a new ``scope()``."""
    inside, index = scope(), Var("i", INDEX)
    body(inside, index)
    extent = const(extent) if isinstance(extent, int) else extent
    return For(index, const(0), extent, kind, sequence(inside.stmts))


def loop_function(params: Sequence[Var | Buffer], body: Stmt, *, shared: bool = False) -> PrimFunc:
    """A PrimFunc that is loops already; ``shared``: see :data:`SHARED_ATTR`."""
    attributes = {"tirx.noalias": True, "tirx.is_scheduled": True, LOOPS_ATTR: True}
    return PrimFunc(list(params), body).with_attr({**attributes, SHARED_ATTR: True} if shared else attributes)
