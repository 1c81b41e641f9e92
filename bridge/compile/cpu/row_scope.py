"""Row scope: index expressions, per-row values and row buffers that the code of one row shares while it is emitted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.tirx import Buffer, BufferLoad, BufferStore, Expr, Stmt

from bridge.compile.codegen.emit import Emitter, stack_buffer
from bridge.compile.codegen.pointwise import RULES, compute_type
from bridge.compile.codegen.rounding import converted, rounded
from bridge.compile.loop_ir.graph import Concat, Operand, Pointwise, Reduction, Scalar, Value
from bridge.compile.loop_ir.views import View
from bridge.compile.schedule.row_plan import RowPlan

__all__ = ["KernelBuffers", "RowScope"]


@dataclass(frozen=True)
class KernelBuffers:
    """The kernel's memory: every input and result as a flat buffer, and the column reductions' partial results."""

    flat: Mapping[Value, Buffer]
    partial: Mapping[Reduction, Buffer]


class RowScope:
    """Emission state of one row.

    Attributes:
        task: index of the task that walks the row.
        row: index of the row, once :meth:`start` named it.
        extents: of the loops over the columns.
        head: emits per-row code, before and between the passes.
        scalars: per-row values known so far.
        row_buffers: elementwise values cached for later passes.
        allocations: statements that make the buffers of a row.
    """

    def __init__(self, plan: RowPlan, buffers: KernelBuffers, task: Expr, extents: tuple[int, ...]) -> None:
        self.plan = plan
        self.buffers = buffers
        self.task = task
        self.extents = extents
        self.head = Emitter(1)
        self.scalars: dict[Value, Expr] = {}
        self.allocations: list[Stmt] = []
        self.row_buffers: dict[Value, Buffer] = {}
        self._bases: dict[tuple, Expr] = {}
        self._loads: dict[tuple, Expr] = {}
        for row_pass in plan.passes:
            for value in row_pass.cached:
                self.row_buffers[value] = self.allocate(self.length, compute_type(value.dtype), "cached")

    @property
    def length(self) -> int:
        """Elements of this row."""
        return math.prod(self.extents)

    def const(self, number: int) -> Expr:
        """An index known at compile time."""
        return tirx.const(number, self.plan.index_type)

    def allocate(self, size: int, dtype: str, name: str) -> Buffer:
        """A buffer on the stack."""
        buffer, allocation = stack_buffer(size, dtype, f"{name}{len(self.allocations)}")
        self.allocations.append(allocation)
        return buffer

    def start(self, row: Expr) -> None:
        """Names the row's index."""
        self.row = self.head.name_index(row, "row")

    def element(self, position: Expr) -> Expr:
        """Index of the element at ``position`` of the row in a dense tensor of the space's size."""
        return self.row * self.const(self.plan.columns) + position

    def per_row_values(self, level: int) -> None:
        """Computes, and stores where wanted, the per-row values that wait for ``level`` reductions at most."""
        for node in self.plan.group.nodes:
            if node not in self.plan.group.per_row or node.out in self.scalars:
                continue
            if self.plan.level(node.out) <= level:
                self.set_scalar(node.out, self.compute(node, self.head, self._per_row_operand))

    def set_scalar(self, value: Value, computed: Expr) -> None:
        """From now on, ``computed`` is the row's element of ``value``; stored if it is a result."""
        self.scalars[value] = computed
        if value in self.plan.stored:
            stored = self.head.cast(computed, value.dtype)
            self.head.stmts.append(BufferStore(self.buffers.flat[value], stored, [self.row]))

    def _per_row_operand(self, operand: Operand) -> Expr:
        if operand.value in self.scalars:
            return self.scalars[operand.value]
        return self.load_scalar(operand, self.plan.columns)

    def load_scalar(self, operand: Operand, scale: int) -> Expr:
        """The operand's element for this row, loaded once; ``scale``: see :meth:`Space.strides`."""
        key = (operand.value, operand.view, scale)
        if key not in self._loads:
            load = BufferLoad(self.buffers.flat[operand.value], [self.base(operand.view, scale)])
            self._loads[key] = self.head.bind(self.head.cast(load, compute_type(operand.dtype)), "s")
        return self._loads[key]

    def base(self, view: View, scale: int) -> Expr:
        """Index of the row's first element in a view; bound once per row."""
        strides, _ = self.plan.space.strides(view, scale)
        key = (strides, view.offset)
        if key not in self._bases:
            base: Expr = self.const(view.offset)
            below = 1
            runs: list[tuple[int, int, int]] = []  # (rows below, extent, stride), neighbours of one stride merged
            for extent, stride in reversed(list(zip(self.plan.space.rows, strides, strict=True))):
                if runs and stride == runs[-1][2] * runs[-1][1]:
                    low, size, step = runs[-1]
                    runs[-1] = (low, size * extent, step)
                else:
                    runs.append((below, extent, stride))
                below *= extent
            for low, size, stride in runs:
                if stride == 0:
                    continue
                at = tirx.truncdiv(self.row, self.const(low)) if low > 1 else self.row
                at = tirx.truncmod(at, self.const(size)) if low * size < below else at
                base = base + at * self.const(stride)
            self._bases[key] = self.head.name_index(base, "base")
        return self._bases[key]

    def compute(
        self, node: Pointwise, e: Emitter, read: Callable[[Operand], Expr], sections: Sequence[int | None] = ()
    ) -> Expr:
        """A node's value from its operands' values, rounded to its type.

        Args:
            read: the value of an operand, in its compute type.
            sections: indices of the unrolled loops over the columns, ``None`` for the others.
        """
        operands = [self._section(node, sections)] if isinstance(node, Concat) else node.operands
        args = [e.const(op.number, compute_type(op.dtype)) if isinstance(op, Scalar) else read(op) for op in operands]
        if node.op == "astype":
            return e.bind(converted(e, args[0], node.operands[0].dtype, node.out.dtype))
        return e.bind(rounded(e, RULES[node.op](e, *args), node.out.dtype, node.op))

    def unrolled(self, axis: int) -> bool:
        """Whether the loop over that extent of the columns walks the sections of a concatenation."""
        below = math.prod(self.extents[axis + 1 :])
        return any(_walks_sections(concat, below) for concat in self.plan.concats)

    def _section(self, concat: Concat, sections: Sequence[int | None]) -> Operand | Scalar:
        """The operand that a concatenation reads where its sections are unrolled like this."""
        section = 0
        for axis, k in enumerate(sections):
            below = math.prod(self.extents[axis + 1 :])
            if _walks_sections(concat, below):
                section += k * (below // concat.inner)
        return concat.operands[section]


def _walks_sections(concat: Concat, below: int) -> bool:
    return concat.inner <= below < concat.inner * len(concat.operands)
