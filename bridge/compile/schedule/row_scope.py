"""Row values: index expressions and per-row values that the code of one row shares while it is emitted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.tirx import Buffer, BufferLoad, BufferStore, Expr, IfThenElse, Stmt

from bridge.compile.codegen.arguments import LaunchArguments
from bridge.compile.codegen.emit import Emitter, element_type
from bridge.compile.codegen.pointwise import RULES, compute_type
from bridge.compile.codegen.rounding import converted, rounded
from bridge.compile.codegen.tir import sequence
from bridge.compile.loop_ir.access import Access, Term
from bridge.compile.schedule.row_plan import Compute, Index, Literal, Made, Operand, Passed, Read, RowPlan

__all__ = ["KernelBuffers", "RowValues"]


@dataclass(frozen=True)
class KernelBuffers:
    """The kernel's memory: inputs in order; results, partial results of column reductions, and row buffers of a length
    that is known at the launch (a row for each task), by node."""

    inputs: Sequence[Buffer]
    outputs: Mapping[int, Buffer]
    partial: Mapping[int, Buffer]
    cached: Mapping[int, Buffer]


class RowValues:
    """Emission state of one row that no target changes.

    Attributes:
        number: a number of the plan as an index.
        row: index of the row, once :meth:`start` named it.
        head: emits per-row code, before and between the passes.
        scalars: per-row values known so far, by node.
    """

    def __init__(self, plan: RowPlan, buffers: KernelBuffers, number: LaunchArguments, head: Emitter) -> None:
        self.plan = plan
        self.buffers = buffers
        self.number = number
        self.head = head
        self.scalars: dict[int, Expr] = {}
        self._bases: dict[tuple, Expr] = {}
        self._coordinates: dict[tuple, Expr] = {}
        self._loads: dict[tuple, Expr] = {}
        self._passed: dict[Passed, Expr] = {}

    def start(self, row: Expr) -> None:
        """Names the row's index."""
        self.row = self.head.name_index(row, "row")

    def element(self, position: Expr) -> Expr:
        """Index of the element at ``position`` of the row in a dense tensor of the space's size."""
        return self.row * self.number(self.plan.length) + position

    def result(self, node: int, position: Expr) -> Expr:
        """Index of the element at ``position`` of the row in a node's result."""
        behind = self.plan.nodes[node].behind
        at = self.element(position)
        return at + self.row * self.number(behind) if behind else at

    def behind(self, node: int, buffer: Buffer, position: Expr, lanes: int) -> list[Stmt]:
        """Stores the zeros behind a row of a node's result, with its last vector; one begins at ``position``."""
        count, number = self.plan.nodes[node].behind, self.number
        if not count:
            return []
        first = self.result(node, position) + number(lanes)
        zero = tirx.const(0, str(buffer.dtype))
        zeros = [BufferStore(buffer, zero, [first + number(place)]) for place in range(count)]
        return [IfThenElse(tirx.GE(position + number(lanes), number(self.plan.length)), sequence(zeros), None)]

    def place_of(self, tensor: int, index: Expr) -> Expr:
        """Index of an input's element, by its index in the tensor: another one where only a part is in memory."""
        return index

    def per_row_values(self, level: int) -> None:
        """Computes, and stores where wanted, the per-row values that wait for ``level`` reductions at most."""
        for index, node in enumerate(self.plan.nodes):
            if node.per_row and not node.reduces and index not in self.scalars and self.plan.levels[index] <= level:
                self.set_scalar(index, self.compute(node, self.head, self._per_row_operand))

    def set_scalar(self, node: int, computed: Expr) -> None:
        """From now on, ``computed`` is the row's value of a node; stored if it is a result."""
        self.scalars[node] = computed
        if node in self.buffers.outputs:
            stored = self.head.stored(computed, self.plan.nodes[node].dtype)
            self.store_scalar(BufferStore(self.buffers.outputs[node], stored, [self.row]))

    def store_scalar(self, store: Stmt) -> None:
        """Emits the store of a per-row result."""
        self.head.stmts.append(store)

    def _per_row_operand(self, operand: Read | Index | Made) -> Expr:
        match operand:
            case Made():
                return self.scalars[operand.node]
            case Index():
                return self.base(operand.access)
        return self.load_scalar(operand)

    def load_scalar(self, read: Read) -> Expr:
        """The input's element for this row, loaded once."""
        key = (read.tensor, read.access.offset, read.access.terms)
        if key not in self._loads:
            load = BufferLoad(self.buffers.inputs[read.tensor], [self.base(read.access)])
            self._loads[key] = self.head.bind(self.head.loaded(load, self.plan.dtype(read)), "s")
        return self._loads[key]

    def base(self, access: Access) -> Expr:
        """Index of the row's first element in an input; bound once per row."""
        key = (access.offset, access.terms)
        if key not in self._bases:
            base: Expr = self.number(access.offset)
            for term in access.terms:
                at = self._coordinate(term)
                base = base + (at if term.stride == 1 else at * self.number(term.stride))
            self._bases[key] = self.head.name_index(base, "base")
        return self._bases[key]

    def _coordinate(self, term: Term) -> Expr:
        key = (term.below, term.extent)
        if key not in self._coordinates:
            at = self.number.coordinate(self.row, term)
            self._coordinates[key] = at if at is self.row else self.head.name_index(at, "at")
        return self._coordinates[key]

    def compute(
        self, node: Compute, e: Emitter, read: Callable[[Operand], Expr], sections: Sequence[int | None] = ()
    ) -> Expr:
        """A node's value from its operands' values, rounded to its type.

        Args:
            read: the value of an operand, in its compute type.
            sections: indices of the unrolled loops over the columns, ``None`` for the others.
        """
        operands = [self._section(node, sections)] if node.sections else node.operands
        args = self.values(operands, e, read)
        if node.op == "astype":
            return e.bind(converted(e, args[0], self.plan.dtype(node.operands[0]), node.dtype))
        return e.bind(rounded(e, RULES[node.op](e, *args), node.dtype, node.op))

    def values(self, operands: Sequence[Operand], e: Emitter, read: Callable[[Operand], Expr]) -> list[Expr]:
        """The values of operands; ``read``: of those that are no numbers."""
        return [self._number(each, e) if isinstance(each, Literal | Passed) else read(each) for each in operands]

    def _number(self, operand: Literal | Passed, e: Emitter) -> Expr:
        """A number in every lane, in its compute type. One that the launch passes is converted once per row, as torch
        converts Python's numbers: through float64."""
        if isinstance(operand, Literal):
            return e.const(operand.number, compute_type(operand.dtype))
        if operand not in self._passed:
            number = self.number.value(operand.argument)
            if "float" in operand.dtype:
                number = self.head.bind(tirx.Cast("float64", number))
            source = element_type(number)
            self._passed[operand] = self.head.bind(converted(self.head, number, source, operand.dtype), "passed")
        return e.broadcast(self._passed[operand])

    def unrolled(self, axis: int) -> bool:
        """Whether the loop over that extent of the columns walks the sections of a concatenation."""
        return any(axis in dict(concat.sections) for concat in self.plan.concats)

    def _section(self, concat: Compute, turns: Sequence[int | None]) -> Operand:
        """The operand that a concatenation reads in these turns of the loops, ``None`` for those not unrolled."""
        return concat.operands[sum(turns[axis] * count for axis, count in concat.sections)]
