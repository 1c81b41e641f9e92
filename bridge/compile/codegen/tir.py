"""TIR: kernels as functions of TVM's IR, their arguments, rounding, and lowering to LLVM's input."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import tvm
from tvm import tirx
from tvm.ir import PointerType, PrimType
from tvm.tirx import Bind, Buffer, BufferLoad, DeclBuffer, Expr, For, ForKind, PrimFunc, SeqStmt, Stmt, Var

from autodiff.ir import compute_type, itemsize
from bridge.compile.codegen.emit import Emitter, different
from bridge.compile.loop_ir.operations import Argument, Number, Term

__all__ = ["INDEX", "SHARED_ATTR", "LaunchArguments", "LoopScope", "const"]
__all__ += ["converted", "flat_buffer", "loop", "loop_function", "lower_loops", "rounded", "sequence"]

INDEX = "int64"
"""Index type of functions that serve every shape."""

SHARED_ATTR = "bridge.shared"
"""Marks PrimFuncs that serve every shape: built separately, and kept in the cache even when unused."""


def const(number: int) -> Expr:
    """An index known at compile time."""
    return tirx.const(number, INDEX)


def sequence(stmts: Sequence[Stmt]) -> Stmt:
    """One statement that runs ``stmts`` in order."""
    return stmts[0] if len(stmts) == 1 else SeqStmt(list(stmts))


class _Collects(Protocol):
    stmts: list[Stmt]


class LoopScope:
    """Collects the statements of one loop body, in order."""

    def __init__(self) -> None:
        self.stmts: list[Stmt] = []

    def name(self, value: Expr, hint: str) -> Var:
        """Binds an index to a variable of this scope."""
        var = Var(hint, INDEX)
        self.stmts.append(tirx.Bind(var, value))
        return var

    def add(self, *stmts: Stmt) -> None:
        """Appends statements."""
        self.stmts += stmts

    @property
    def body(self) -> Stmt:
        """All statements as one."""
        return sequence(self.stmts)


Body = TypeVar("Body", bound=_Collects)


def loop(
    extent: Expr | int,
    body: Callable[[Body, Var], None],
    kind: ForKind = ForKind.SERIAL,
    scope: Callable[[], Body] = LoopScope,
) -> Stmt:
    """``for i in range(extent)``: ``body(scope, i)`` adds the statements of one iteration to a new ``scope()``."""
    inside, index = scope(), Var("i", INDEX)
    body(inside, index)
    extent = const(extent) if isinstance(extent, int) else extent
    return For(index, const(0), extent, kind, sequence(inside.stmts))


def loop_function(params: Sequence[Var | Buffer], body: Stmt, *, shared: bool = False) -> PrimFunc:
    """A PrimFunc from loops; ``shared``: see :data:`SHARED_ATTR`."""
    attributes = {"tirx.noalias": True, "tirx.is_scheduled": True}
    return PrimFunc(list(params), body).with_attr({**attributes, SHARED_ATTR: True} if shared else attributes)


def rounded(e: Emitter, value: Expr, dtype: str, op: str = "") -> Expr:
    """Rounds ``value`` to a stored type, in its compute type; ``copy``, ``concat`` and ``pad`` need no rounding."""
    if compute_type(dtype) == dtype or op in ("copy", "concat", "pad"):
        return value
    return e.rounded(value, dtype)


def converted(e: Emitter, value: Expr, source: str, target: str) -> Expr:
    """``astype``: casts a value of element type ``source`` to ``target``, both in their compute types."""
    if target == "bool":
        return different(value, e.const(0, compute_type(source)))
    if source == "bool":
        kind = compute_type(target)
        return e.select(value, e.const(1, kind), e.const(0, kind))
    if "float" in source and "int" in target:
        return e.truncated(value, target)
    return rounded(e, e.cast(value, compute_type(target)), target)


def lower_loops() -> tuple[tvm.transform.Pass, Callable, Callable]:
    """Lowering passes: (for the packed calling convention, for the host's part, for the device's part).

    TVM's default pipeline simplifies under an analyzer that substitutes every bound variable by its value, which is
    exponential in the length of a chain of bindings (as in a polynomial). These passes do not.

    The calling convention's argument checks (number of dimensions, extents, dtype, device, strides) are more code than
    most kernels and take over half of LLVM's time. Only the kernel's own Program calls it, checks its inputs once per
    call and makes all other tensors itself; so these checks are left out.
    """
    passes = [
        tirx.transform.BF16ComputeLegalize(),
        tirx.transform.VerifyMemory(),
        tirx.transform.AnnotateEntryFunc(),
        tirx.transform.SplitHostDevice(),
        tirx.transform.MakePackedAPI(),
        tirx.transform.SkipAssert(),
        tirx.transform.BF16StorageLegalize(),
    ]
    return tvm.transform.Sequential(passes), tirx.transform.LowerTVMBuiltin, lambda: tvm.transform.Sequential([])


_ELEMENTS = {"int32": 2**31 - 1, INDEX: 1 << 40}


def flat_buffer(dtype: str, name: str, index_type: str, pointer: Var | None = None) -> Buffer:
    """A flat buffer for a tensor of any shape, with element alignment."""
    extent = tirx.const(_ELEMENTS[index_type], index_type)
    return tirx.decl_buffer((extent,), dtype, name, data=pointer, data_alignment=itemsize(dtype))


class LaunchArguments:
    """The integer arguments of a launch, as variables.

    Attributes:
        params: the kernel's descriptor parameter, if there are any integers.
        stmts: the bindings, for the kernel's beginning; complete only after all other code is emitted.
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
        """The ``count`` integers from ``first`` on, for one of several plans, in that plan's index type."""
        found = copy.copy(self)
        found._first, found._variables = first, self._variables[first : first + count]
        if index_type not in (None, self.index_type):
            found.index_type, wide = index_type, found._variables
            found._variables = [Var(f"m{index}", index_type) for index in range(count)]
            casts = zip(found._variables, wide, strict=True)
            self.stmts += [Bind(short, tirx.Cast(index_type, number)) for short, number in casts]
        return found

    def __call__(self, number: Number) -> Expr:
        """A plan's number as an index."""
        return tirx.const(number, self.index_type) if isinstance(number, int) else self._variables[number.index]

    def value(self, argument: Argument) -> Expr:
        """An argument as int64, whatever the index type: for arithmetic on values."""
        if self.index_type == INDEX:
            return self._variables[argument.index]
        place = self._first + argument.index
        if place not in self._wide:
            variable = self._wide[place] = Var(f"x{place}", INDEX)
            self.stmts.append(Bind(variable, BufferLoad(self._descriptor, [const(place)])))
        return self._wide[place]

    def coordinate(self, index: Expr, term: Term) -> Expr:
        """A loop's coordinate from the flat iteration number."""
        at = index if term.below == 1 else tirx.truncdiv(index, self(term.below))
        return at if term.extent is None else tirx.truncmod(at, self(term.extent))

    def within(self, position: Expr, extents: Sequence[Number], strides: Sequence[Number]) -> Expr:
        """The index of an element in nested loops of these extents, from its number."""
        index = self(0)
        for axis in reversed(range(len(extents))):
            at = tirx.truncmod(position, self(extents[axis])) if axis else position
            position = tirx.truncdiv(position, self(extents[axis]))
            if strides[axis]:
                index = index + at * self(strides[axis])
        return index

    def index(self, first: Expr, index: Expr, terms: tuple[Term, ...]) -> Expr:
        """An element's index: ``first`` plus the terms at a flat iteration number."""
        for term in terms:
            first = first + self.coordinate(index, term) * self(term.stride)
        return first
