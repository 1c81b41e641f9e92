"""Parameters of kernels that serve many launches: flat memory of unknown extent, integers read from a descriptor."""

from __future__ import annotations

import copy

from tvm import tirx
from tvm.ir import PointerType, PrimType
from tvm.tirx import Bind, Buffer, BufferLoad, DeclBuffer, Expr, Stmt, Var

from autodiff.ir import itemsize
from bridge.compile.codegen.tir import INDEX, const
from bridge.compile.loop_ir.access import Argument, Number, Term

__all__ = ["LaunchArguments", "flat_buffer"]

_ELEMENTS = {"int32": 2**31 - 1, INDEX: 1 << 40}


def flat_buffer(dtype: str, name: str, index_type: str, pointer: Var | None = None) -> Buffer:
    """Memory of a tensor of any shape, aligned as its elements are."""
    extent = tirx.const(_ELEMENTS[index_type], index_type)
    return tirx.decl_buffer((extent,), dtype, name, data=pointer, data_alignment=itemsize(dtype))


class LaunchArguments:
    """The integers that a launch passes, as variables.

    Attributes:
        params: the kernel's parameter for the descriptor, if it takes any.
        stmts: what binds the variables, for the beginning of the kernel, once everything else is made.
    """

    def __init__(self, count: int, index_type: str) -> None:
        self.index_type = index_type
        self.params: list[Var] = []
        self.stmts: list[Stmt] = []
        self._first = 0
        self._variables = [Var(f"n{index}", index_type) for index in range(count)]
        self._wide: dict[int, Var] = {}
        if not count:
            return
        pointer = Var("descriptor", PointerType(PrimType(INDEX)))
        self._descriptor = flat_buffer(INDEX, "descriptor", INDEX, pointer)
        self.params.append(pointer)
        self.stmts.append(DeclBuffer(self._descriptor, data=pointer))
        for index, variable in enumerate(self._variables):
            number: Expr = BufferLoad(self._descriptor, [const(index)])
            self.stmts.append(Bind(variable, number if index_type == INDEX else tirx.Cast(index_type, number)))

    def part(self, first: int, count: int, index_type: str | None = None) -> LaunchArguments:
        """The integers of one of several plans, ``count`` from ``first`` on, as if they were all; of its index type."""
        found = copy.copy(self)
        found._first, found._variables = first, self._variables[first : first + count]
        if index_type not in (None, self.index_type):
            found.index_type, wide = index_type, found._variables
            found._variables = [Var(f"m{index}", index_type) for index in range(count)]
            casts = zip(found._variables, wide, strict=True)
            self.stmts += [Bind(short, tirx.Cast(index_type, number)) for short, number in casts]
        return found

    def __call__(self, number: Number) -> Expr:
        """A number of a plan as an index."""
        return tirx.const(number, self.index_type) if isinstance(number, int) else self._variables[number.index]

    def value(self, argument: Argument) -> Expr:
        """An argument as int64, whatever an index is: a number that is computed with."""
        if self.index_type == INDEX:
            return self._variables[argument.index]
        place = self._first + argument.index
        if place not in self._wide:
            variable = self._wide[place] = Var(f"x{place}", INDEX)
            self.stmts.append(Bind(variable, BufferLoad(self._descriptor, [const(place)])))
        return self._wide[place]

    def coordinate(self, index: Expr, term: Term) -> Expr:
        """A loop's coordinate from the number of the turn in all of them."""
        at = index if term.below == 1 else tirx.truncdiv(index, self(term.below))
        return at if term.extent is None else tirx.truncmod(at, self(term.extent))

    def index(self, first: Expr, index: Expr, terms: tuple[Term, ...]) -> Expr:
        """``first`` and the terms of the turn of that number: where an element is."""
        for term in terms:
            first = first + self.coordinate(index, term) * self(term.stride)
        return first
