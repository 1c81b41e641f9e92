"""The code of one row: its passes over the columns, and the vector steps of a pass."""

from __future__ import annotations

import math
import platform
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tvm import tirx
from tvm.tirx import Buffer, BufferLoad, BufferStore, Expr, For, ForKind, SeqStmt, Stmt, Var

from bridge.compile.codegen.emit import LANES, Emitter, element_type, stack_buffer
from bridge.compile.codegen.pointwise import EXPENSIVE, RULES, compute_type, different
from bridge.compile.loop_ir.graph import Concat, Operand, Pointwise, Reduction, Scalar, Value
from bridge.compile.loop_ir.views import View
from bridge.compile.schedule.reduction import combine, fold_lanes, identity, unroll

if TYPE_CHECKING:
    from bridge.compile.cpu.loops import RowKernel

__all__ = ["Row", "sequence"]

_CHEAP = 4
"""Operations: a value of so few is computed again in a later sweep instead of kept."""


@dataclass
class _Sweep:
    """What one pass over the columns has to produce."""

    reductions: list[Reduction] = field(default_factory=list)
    stores: list[Value] = field(default_factory=list)
    kept: list[Value] = field(default_factory=list)  # into row temporaries


class Row:
    """The code of one row of ``length`` elements."""

    def __init__(self, kernel: RowKernel, task: Expr, length: int) -> None:
        self.kernel = kernel
        self.group = kernel.group
        self.task = task
        self.length = length
        self.allocations: list[Stmt] = []
        self.temporaries: dict[Value, Buffer] = {}
        self.scalars: dict[Value, Expr] = {}
        self.head = Emitter(1)
        self.bases: dict[tuple[View, int], Expr] = {}
        self.loads: dict[tuple, Expr] = {}
        self.sweeps = self._plan()
        for sweep in self.sweeps:
            for value in sweep.kept:
                self.temporaries[value] = self._allocate(length, compute_type(value.dtype), "kept")

    def _allocate(self, size: int, dtype: str, name: str) -> Buffer:
        buffer, allocation = stack_buffer(size, dtype, f"{name}{len(self.allocations)}")
        self.allocations.append(allocation)
        return buffer

    # Planning

    def _plan(self) -> list[_Sweep]:
        level = self.kernel.level
        count = 1 + max((level(out) for node in self.group.nodes for out in node.outs), default=0)
        sweeps = [_Sweep() for _ in range(count)]
        for node in self.group.nodes:
            if isinstance(node, Reduction):
                sweeps[level(node.operand.value)].reductions.append(node)
            elif node.out in self.kernel.stored and node not in self.group.rows_of:
                sweeps[level(node.out)].stores.append(node.out)
        kept: set[Value] = set()
        for index in reversed(range(count)):
            sweep = sweeps[index]
            roots = [node.operand.value for node in sweep.reductions] + sweep.stores + sweep.kept
            for value in self._wanted(roots, index):
                if value not in kept and not self._cheap(value, kept):
                    kept.add(value)
                    sweeps[level(value)].kept.append(value)
        self.kept = kept
        return sweeps

    def _wanted(self, roots: list[Value], index: int) -> list[Value]:
        """Full values of earlier sweeps that this sweep reads and that were not stored."""
        wanted: dict[Value, None] = {}
        seen: set[Value] = set()
        stack = [root for root in roots if root in self.group.made]
        while stack:
            value = stack.pop()
            if value in seen or self.kernel.is_row(value):
                continue
            seen.add(value)
            if self.kernel.level(value) < index:
                if value not in self.kernel.stored:
                    wanted[value] = None
                continue
            node = self.group.made[value]
            stack += [op.value for op in node.operands if isinstance(op, Operand) and op.value in self.group.made]
        return list(wanted)

    def _cheap(self, value: Value, kept: set[Value]) -> bool:
        cost, loads = 0, set()
        stack, seen = [value], set()
        while stack:
            current = stack.pop()
            if current in seen or self.kernel.is_row(current):
                continue
            seen.add(current)
            if (
                current not in self.group.made
                or current in kept
                or (current in self.kernel.stored and current != value)
            ):
                loads.add(current)
                continue
            node = self.group.made[current]
            cost += _CHEAP + 1 if node.op in EXPENSIVE else node.op != "copy"
            stack += [operand.value for operand in node.operands if isinstance(operand, Operand)]
        return cost <= _CHEAP and len(loads) <= 2

    # Emission

    def emit(self, row: Expr, extents: tuple[int, ...]) -> Stmt:
        self.extents = extents
        self.row = self.head.name_index(row, "row")
        stmts: list[Stmt] = []
        for index, sweep in enumerate(self.sweeps):
            self._row_values(index)
            stmts += self.head.stmts
            self.head.stmts = []
            stmts += self._sweep(index, sweep)
        self._row_values(len(self.sweeps))
        return sequence(stmts + self.head.stmts)

    def _row_values(self, index: int) -> None:
        """Point-wise values of the row that are known before sweep ``index``."""
        for node in self.group.nodes:
            if node not in self.group.rows_of or node.out in self.scalars:
                continue
            if self.kernel.level(node.out) <= index:
                self.scalars[node.out] = self._compute(node, self.head, self._row_operand)
                self._store_scalar(node.out)

    def _store_scalar(self, value: Value) -> None:
        if value in self.kernel.stored:
            stored = self.head.cast(self.scalars[value], value.dtype)
            self.head.stmts.append(BufferStore(self.kernel.flat[value], stored, [self.row]))

    def _row_operand(self, operand: Operand) -> Expr:
        if operand.value in self.scalars:
            return self.scalars[operand.value]
        return self._load_scalar(operand, self.kernel.columns)

    def _load_scalar(self, operand: Operand, scale: int) -> Expr:
        key = (operand.value, operand.view, scale)
        if key not in self.loads:
            load = BufferLoad(self.kernel.flat[operand.value], [self._base(operand.view, scale)])
            self.loads[key] = self.head.bind(self.head.cast(load, compute_type(operand.dtype)), "s")
        return self.loads[key]

    def _base(self, view: View, scale: int) -> Expr:
        """Index of the row's first element in a view; bound once per row."""
        strides, _ = self.kernel.space.strides(view, scale)
        key = (strides, view.offset)
        if key not in self.bases:
            const = self.kernel.const
            dims = [(extent, stride) for extent, stride in zip(self.kernel.space.rows, strides, strict=True)]
            base: Expr = const(view.offset)
            below = 1
            runs: list[tuple[int, int, int]] = []  # (rows below, extent, stride), neighbours of one stride merged
            for extent, stride in reversed(dims):
                if runs and stride == runs[-1][2] * runs[-1][1]:
                    low, size, step = runs[-1]
                    runs[-1] = (low, size * extent, step)
                else:
                    runs.append((below, extent, stride))
                below *= extent
            for low, size, stride in runs:
                if stride == 0:
                    continue
                at = tirx.truncdiv(self.row, const(low)) if low > 1 else self.row
                at = tirx.truncmod(at, const(size)) if low * size < below else at
                base = base + at * const(stride)
            self.bases[key] = self.head.name_index(base, "base")
        return self.bases[key]

    def _sweep(self, index: int, sweep: _Sweep) -> list[Stmt]:
        if not (sweep.reductions or sweep.stores or sweep.kept):
            return []
        rows = [node for node in sweep.reductions if node.inner == 1]
        width = unroll(self.length) if rows else 1
        last = self.extents[-1]
        steps = ((LANES, width, 0, last // LANES), (1, 1, last - last % LANES, last % LANES))
        accumulators = {}
        start: list[Stmt] = []
        for node in rows:
            dtype = compute_type(node.out.dtype)
            for lanes, copies, _, trips in steps:
                if trips:
                    buffer = self._allocate(lanes * copies, dtype, "acc")
                    accumulators[node, lanes] = buffer
                    e = Emitter(lanes)
                    for copy in range(copies):
                        first = e.const(identity(node.op, dtype), dtype)
                        start.append(BufferStore(buffer, first, [e.index(self.kernel.const(copy * lanes), 1)]))

        def vectors(outer: list[Expr], sections: list[int | None]) -> list[Stmt]:
            loops: list[Stmt] = []
            const = self.kernel.const
            for lanes, copies, begin, trips in steps:
                if not trips:
                    continue
                i = Var("i", self.kernel.index_type)
                body: list[Stmt] = []
                for copy in range(copies):
                    at = const(begin) + (i * const(copies) + const(copy)) * const(lanes)
                    body += _Body(self, index, lanes, [*outer, at], sections, accumulators, copy).emit(sweep)
                loops.append(For(i, const(0), const(trips // copies), ForKind.SERIAL, sequence(body)))
            return loops

        stmt = sequence(self._column_loops([], [], vectors))
        hoisted, self.head.stmts = self.head.stmts, []  # scalar loads that the bodies asked for
        for node in rows:
            self._finish_row(node, accumulators, width)
        finish, self.head.stmts = self.head.stmts, []
        return [*start, *hoisted, stmt, *finish]

    def _column_loops(self, at: list[Expr], sections: list[int | None], body) -> list[Stmt]:
        """Loops over all column extents but the last; those over the sections of a concatenation are unrolled."""
        axis = len(at)
        if axis == len(self.extents) - 1:
            return body(at, sections)
        extent = self.extents[axis]
        below = math.prod(self.extents[axis + 1 :])
        if any(concat.inner <= below < concat.inner * len(concat.operands) for concat in self.kernel.concats):
            unrolled = []
            for k in range(extent):
                unrolled += self._column_loops([*at, self.kernel.const(k)], [*sections, k], body)
            return unrolled
        var = Var(f"c{axis}", self.kernel.index_type)
        inside = sequence(self._column_loops([*at, var], [*sections, None], body))
        return [For(var, self.kernel.const(0), self.kernel.const(extent), ForKind.SERIAL, inside)]

    def _section(self, concat: Concat, sections: list[int | None]) -> Operand | Scalar:
        """The operand that a concatenation reads where its sections are unrolled like this."""
        section = 0
        for axis, k in enumerate(sections):
            below = math.prod(self.extents[axis + 1 :])
            if concat.inner <= below < concat.inner * len(concat.operands):
                section += k * (below // concat.inner)
        return concat.operands[section]

    def _finish_row(self, node: Reduction, accumulators: dict, width: int) -> None:
        total = None
        if (node, LANES) in accumulators:
            e = Emitter(LANES)
            buffer = accumulators[node, LANES]
            parts = [e.bind(BufferLoad(buffer, [e.index(self.kernel.const(k * LANES), 1)])) for k in range(width)]
            while len(parts) > 1:
                parts = [e.bind(combine(e, node.op, a, b)) for a, b in zip(parts[::2], parts[1::2], strict=True)]
            total = fold_lanes(e, node.op, parts[0])
            self.head.stmts += e.stmts
        if (node, 1) in accumulators:
            tail = self.head.bind(BufferLoad(accumulators[node, 1], [self.kernel.const(0)]))
            total = tail if total is None else self.head.bind(combine(self.head, node.op, total, tail))
        total = _rounded(self.head, total, node.out.dtype)
        self.scalars[node.out] = self.head.bind(total, "r")
        self._store_scalar(node.out)

    def _compute(self, node: Pointwise, e: Emitter, read, sections: list[int | None] = ()) -> Expr:
        operands = [self._section(node, sections)] if isinstance(node, Concat) else node.operands
        args = [e.const(op.number, compute_type(op.dtype)) if isinstance(op, Scalar) else read(op) for op in operands]
        if node.op == "astype":
            return e.bind(_converted(e, args[0], node))
        return e.bind(_rounded(e, RULES[node.op](e, *args), node.out.dtype, node.op))


class _Body:
    """One vector (or scalar) step of a sweep."""

    def __init__(
        self,
        row: Row,
        index: int,
        lanes: int,
        at: list[Expr],
        sections: list[int | None],
        accumulators: dict,
        copy: int,
    ) -> None:
        self.row = row
        self.kernel = row.kernel
        self.index = index
        self.e = Emitter(lanes)
        self.at = at
        self.sections = sections
        self.accumulators = accumulators
        self.copy = copy
        self.values: dict[Value, Expr] = {}
        self.loads: dict[tuple, Expr] = {}
        position: Expr = self.kernel.const(0)
        for extent, coordinate in zip(row.extents, at, strict=True):
            position = position * self.kernel.const(extent) + coordinate
        self.position = position  # of the first lane, in the row

    def emit(self, sweep: _Sweep) -> list[Stmt]:
        e = self.e
        for value in sweep.stores:
            index = self.row.row * self.kernel.const(self.kernel.columns) + self.position
            stored = e.cast(self.value(value), value.dtype)
            e.stmts.append(BufferStore(self.kernel.flat[value], stored, [e.index(index, 1)]))
        for value in sweep.kept:
            buffer = self.row.temporaries[value]
            e.stmts.append(BufferStore(buffer, self.value(value), [e.index(self.position, 1)]))
        for node in sweep.reductions:
            dtype = compute_type(node.out.dtype)
            operand = e.cast(self.read(node.operand), dtype)
            if node.inner == 1:
                buffer = self.accumulators[node, e.lanes]
                at = e.index(self.kernel.const(self.copy * e.lanes), 1)
            else:
                buffer = self.kernel.partial[node]
                at = e.index(self.row.task * self.kernel.const(self.kernel.columns) + self.position, 1)
            old = e.bind(BufferLoad(buffer, [at]))
            e.stmts.append(BufferStore(buffer, combine(e, node.op, old, operand), [at]))
        return e.stmts

    def value(self, value: Value) -> Expr:
        """A member's full value at this step."""
        if value not in self.values:
            self.values[value] = self._value(value)
        return self.values[value]

    def _value(self, value: Value) -> Expr:
        if self.kernel.level(value) < self.index:
            if value in self.row.temporaries:
                return self.e.bind(BufferLoad(self.row.temporaries[value], [self.e.index(self.position, 1)]))
            if value in self.kernel.stored:
                index = self.row.row * self.kernel.const(self.kernel.columns) + self.position
                load = BufferLoad(self.kernel.flat[value], [self.e.index(index, 1)])
                return self.e.bind(self.e.cast(load, compute_type(value.dtype)))
        return self.row._compute(self.row.group.made[value], self.e, self.read, self.sections)

    def read(self, operand: Operand) -> Expr:
        """An operand at this step, in its compute type."""
        if operand.value in self.row.scalars:
            return self.e.broadcast(self.row.scalars[operand.value])
        if operand.value in self.row.group.made:
            return self.value(operand.value)
        key = (operand.value, operand.view)
        if key not in self.loads:
            self.loads[key] = self._load(operand)
        return self.loads[key]

    def _load(self, operand: Operand) -> Expr:
        e, view = self.e, operand.view
        _, strides = self.kernel.space.strides(view)
        if not any(strides):
            return e.broadcast(self.row._load_scalar(operand, 1))
        index = self.row._base(view, 1)
        for coordinate, stride in zip(self.at, strides, strict=True):
            if stride:
                index = index + coordinate * self.kernel.const(stride)
        buffer = self.kernel.flat[operand.value]
        if strides[-1] == 0 and e.lanes > 1:
            scalar = BufferLoad(buffer, [index])
            return e.bind(e.cast(e.broadcast(scalar), compute_type(operand.dtype)))
        load = BufferLoad(buffer, [e.index(index, strides[-1])])
        return e.bind(e.cast(load, compute_type(operand.dtype)))


def _rounded(e: Emitter, value: Expr, dtype: str, op: str = "") -> Expr:
    """``value`` rounded to a stored type, in its compute type."""
    if compute_type(dtype) == dtype or op in ("copy", "concat"):
        return value
    value = e.bind(value)
    if dtype == "bfloat16":
        return _rounded_to_bfloat16(e, value)
    return e.cast(e.cast(value, dtype), compute_type(dtype))


def _rounded_to_bfloat16(e: Emitter, value: Expr) -> Expr:
    # By hand: TVM computes bfloat16 in float32 and drops a cast there and back.
    bits = e.bind(e.reinterpret(value, "int32"))
    odd = tirx.bitwise_and(tirx.shift_right(bits, e.const(16, "int32")), e.const(1, "int32"))
    up = e.bind(bits + e.const(0x7FFF, "int32") + odd)
    kept = e.reinterpret(tirx.bitwise_and(up, e.const(-0x10000, "int32")), "float32")
    return e.select(different(value, value), e.const(float("nan"), "float32"), kept)


def _converted(e: Emitter, value: Expr, node: Pointwise) -> Expr:
    source, target = node.operands[0].dtype, node.out.dtype
    if target == "bool":
        return different(value, e.const(0, compute_type(source)))
    if source == "bool":
        kind = compute_type(target)
        return e.select(value, e.const(1, kind), e.const(0, kind))
    if "float" in source and "int" in target:
        return _truncated(e, value, target)
    return _rounded(e, e.cast(value, compute_type(target)), target)


def _truncated(e: Emitter, value: Expr, target: str) -> Expr:
    """A floating point number as an integer; what fits no integer becomes what it becomes in eager.

    C and LLVM leave nan and numbers out of range undefined, so LLVM may make anything of them. On x86 torch's code gets
    the smallest integer of 32 or 64 bits, and narrower types are the low bits of that; ARM's instruction saturates.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return e.cast(value, target)
    wide = "int64" if target in ("int64", "uint8") else "int32"
    smallest, source = -(2 ** (int(wide[3:]) - 1)), element_type(value)
    value = e.bind(e.llvm("llvm.trunc", value))
    fits = tirx.And(value >= e.const(smallest, source), value < e.const(-smallest, source))  # both are powers of two
    return e.cast(e.bind(e.select(fits, e.cast(value, wide), e.const(smallest, wide))), target)


def sequence(stmts: list[Stmt]) -> Stmt:
    return stmts[0] if len(stmts) == 1 else SeqStmt(stmts)
