"""Row plan: a group along rows → its passes over a row with the values that each computes and caches, as plain data.

A row is visited in *passes*: pass ``k`` computes the values that wait for ``k`` successive reductions of the row
(softmax: maximum; exponentials and their sum; the product). A value's *level* is that number. An elementwise value that
a later pass needs again is read back from its store, recomputed if that is cheap, or cached in a row buffer.

Example, a softmax over rows of 64 whose only stored value is the result: three passes, whose reductions are ``max``,
``sum`` and none; the second pass caches the exponentials in a row buffer, and the third stores the result.

A plan holds no tensor, and only numbers that its code is specialized for: the columns of a row, steps between
neighbouring elements. Offsets, strides between rows and numbers of rows are launch arguments, so equal plans of all
time steps, layers and batch sizes share one kernel. A number that is known only when a program is bound is always a
launch argument, also a row's length or a step. :mod:`bridge.compile.schedule.plan_rows` makes plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tvm import tirx
from tvm.tirx import Buffer, BufferLoad, BufferStore, Expr, IfThenElse, Stmt

from autodiff.ir import compute_type
from bridge.compile.codegen.emit import Emitter, element_type
from bridge.compile.codegen.pointwise import RULES
from bridge.compile.codegen.tir import LaunchArguments, converted, flat_buffer, rounded, sequence
from bridge.compile.loop_ir.operations import Access, Argument, Number, Term

__all__ = ["Compute", "Index", "InputElement", "KernelBuffers", "Literal", "NodeElement", "Operand", "PassStep"]
__all__ += ["Passed", "RowPass", "RowPlan", "RowValues", "Walk"]


@dataclass(frozen=True)
class InputElement:
    """An element of the kernel's input number ``tensor``."""

    tensor: int
    access: Access


@dataclass(frozen=True)
class Index:
    """The index of an element that an access would read, as a number of the plan's index type."""

    access: Access


@dataclass(frozen=True)
class NodeElement:
    """The plan's node number ``node`` at the same place."""

    node: int


@dataclass(frozen=True)
class Literal:
    """A number, compared by its text: ``0.0`` and ``-0.0`` differ, nan equals nan."""

    spelled: str
    dtype: str
    number: float | int | bool = field(compare=False)


@dataclass(frozen=True)
class Passed:
    """A launch argument as a number of an element type: a size used in arithmetic."""

    argument: Argument
    dtype: str


Operand = InputElement | Index | NodeElement | Literal | Passed


@dataclass(frozen=True)
class Compute:
    """One operation.

    Attributes:
        dtype: of the result, as stored.
        per_row: whether there is one result per row: a reduction of the row, or arithmetic on per-row values.
        reduces: ``"row"``, ``"column"`` or nothing.
        sections: ``(axis, count)`` of each loop inside a row over the sections of a concatenation (its operands),
            ``count`` sections per iteration; empty for other operations.
        behind: zeros that are stored after each row of the result.
    """

    op: str
    operands: tuple[Operand, ...]
    dtype: str
    per_row: bool = False
    reduces: str = ""
    sections: tuple[tuple[int, int], ...] = ()
    behind: int = 0


@dataclass(frozen=True)
class RowPass:
    """One pass over the row, as indices of nodes.

    Attributes:
        reductions: accumulated in this pass; row reductions are complete at its end.
        stores: elementwise values stored to the kernel's results.
        cached: elementwise values cached in a row buffer for later passes.
    """

    reductions: tuple[int, ...] = ()
    stores: tuple[int, ...] = ()
    cached: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.reductions or self.stores or self.cached)


@dataclass(frozen=True)
class Walk:
    """The order of the rows and their distribution over threads: ``tasks`` tasks of ``task_rows`` rows.

    Attributes:
        rows: of one batch: the leading extent that column reductions do not reduce (``batched``: it is not 1).
        task_rows, chunks, tasks: rows of a task (fewer in a batch's last), tasks per batch, tasks; ``None``: one task.
        block_rows: of column reductions, see :class:`~bridge.compile.schedule.order.ReductionOrder`; 0: no blocks.
            Their scratch memory has a row for each task, followed by as many rows for the blocks. ``block_turns``: the
            same of row reductions.
        parallel: whether threads pay for the tasks; ``parallel_second_stage``: for the sums over the tasks. If the
            launch's sizes decide, an argument, 0 for no.
        vectors: in a flat space, whose last row may be shorter; ``None`` for other spaces.
        tail: ``(index of the first, number of)`` elements after the vectors of a flat space; ``None``: none.
    """

    rows: Number
    task_rows: Number | None = None
    chunks: Number | None = None
    tasks: Number | None = None
    block_rows: int = 0
    block_turns: int = 0
    batched: bool = False
    batches: Number = 1
    parallel: bool | Argument = False
    parallel_second_stage: bool | Argument = False
    vectors: Argument | None = None
    tail: tuple[Argument, Argument] | None = None

    def rows_of(self, task: Expr, number: LaunchArguments) -> tuple[Expr, Expr]:
        """The first row of a task, and the number of its rows."""
        chunk = tirx.truncmod(task, number(self.chunks)) if self.batched else task
        begin = chunk * number(self.task_rows)
        count = tirx.min(number(self.task_rows), number(self.rows) - begin)
        if self.batched:
            begin = tirx.truncdiv(task, number(self.chunks)) * number(self.rows) + begin
        return begin, count


@dataclass(frozen=True)
class RowPlan:
    """The loops of one kernel over the rows of its space. Equal plans have equal code.

    Attributes:
        inputs: element types of the input tensors.
        nodes: the operations, in order.
        outputs: the nodes whose values are written to memory.
        levels: for each node, the number of row reductions it waits for.
        passes: over each row, in order.
        columns: loop extents inside a row, vectors along the last. All static extents are constants if reductions, row
            buffers or sections of a concatenation depend on them, otherwise only the last.
        length: elements of a row.
        buffer_row: elements of a row buffer in scratch memory, one per task; ``None``: buffers are on the stack.
        walk: over the rows.
        index_type: an integer type that reaches every element.
        arguments: number of integers of a launch.
        lanes: of a vector.
        accumulators: candidate numbers of vector accumulators; the first that divides the row's vectors is used, or 1.
        small: whether there is a reduction and all rows together have few elements, see
            :attr:`~bridge.compile.schedule.order.ReductionOrder.small_rows`.
    """

    inputs: tuple[str, ...]
    nodes: tuple[Compute, ...]
    outputs: tuple[int, ...]
    levels: tuple[int, ...]
    passes: tuple[RowPass, ...]
    columns: tuple[Number, ...]
    length: Number
    buffer_row: Argument | None
    walk: Walk
    index_type: str
    arguments: int
    lanes: int
    accumulators: tuple[int, ...]
    small: bool = False

    @property
    def column_reductions(self) -> list[int]:
        """Nodes that reduce over the rows; partials are accumulated per task."""
        return [index for index, node in enumerate(self.nodes) if node.reduces == "column"]

    @property
    def finished(self) -> list[int]:
        """Column reductions whose results are written to memory."""
        return [node for node in self.column_reductions if node in self.outputs]

    @property
    def reads(self) -> set[InputElement]:
        """All elements read from memory."""
        return {each for node in self.nodes for each in node.operands if isinstance(each, InputElement)}

    @property
    def cached(self) -> list[int]:
        """Nodes with a row buffer."""
        return [node for each in self.passes for node in each.cached]

    @property
    def concats(self) -> Iterator[Compute]:
        """Nodes for whose sections the column loops are unrolled."""
        return (node for node in self.nodes if node.sections)

    def dtype(self, operand: Operand) -> str:
        """The element type of an operand, as stored."""
        match operand:
            case InputElement():
                return self.inputs[operand.tensor]
            case Index():
                return self.index_type
            case NodeElement():
                return self.nodes[operand.node].dtype
            case Literal() | Passed():
                return operand.dtype


@dataclass(frozen=True)
class KernelBuffers:
    """The kernel's memory: inputs in order; results, partials of columns and row buffers in scratch memory, by node."""

    inputs: Sequence[Buffer]
    outputs: Mapping[int, Buffer]
    partial: Mapping[int, Buffer]
    cached: Mapping[int, Buffer]

    @classmethod
    def of(cls, plan: RowPlan, stored: Callable[[str], str] = str, suffix: str = "") -> KernelBuffers:
        """A plan's memory; ``stored``: element type → its type in memory, ``suffix``: of the buffers' names."""

        def buffer(dtype: str, name: str) -> Buffer:
            return flat_buffer(stored(dtype), name + suffix, plan.index_type)

        types = [each.dtype for each in plan.nodes]
        partial, cached = plan.column_reductions, plan.cached if plan.buffer_row is not None else ()
        return cls(
            [buffer(dtype, f"in{i}") for i, dtype in enumerate(plan.inputs)],
            {node: buffer(types[node], f"out{i}") for i, node in enumerate(plan.outputs)},
            {node: buffer(compute_type(types[node]), f"partial{i}") for i, node in enumerate(partial)},
            {node: buffer(compute_type(types[node]), f"row{i}") for i, node in enumerate(cached)},
        )

    @property
    def scratch(self) -> tuple[Buffer, ...]:
        """Partials and row buffers, as parameters."""
        return *self.partial.values(), *self.cached.values()


class RowValues:
    """Target-independent emission state of one row.

    Attributes:
        number: a number of the plan → an index.
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
        """Stores the zeros after a row of a node's result, if the vector at ``position`` is the row's last."""
        count, number = self.plan.nodes[node].behind, self.number
        if not count:
            return []
        first = self.result(node, position) + number(lanes)
        zero = tirx.const(0, str(buffer.dtype))
        zeros = [BufferStore(buffer, zero, [first + number(place)]) for place in range(count)]
        return [IfThenElse(tirx.GE(position + number(lanes), number(self.plan.length)), sequence(zeros), None)]

    def code(self, row: Expr, emit_pass: Callable[[int, RowPass], list[Stmt]]) -> list[Stmt]:
        """The code of one row: the per-row values and each pass, in order."""
        self.start(row)
        stmts: list[Stmt] = []
        for index, row_pass in enumerate(self.plan.passes):
            self.per_row_values(index)
            stmts += self.taken()
            stmts += emit_pass(index, row_pass) if row_pass else []
        self.per_row_values(len(self.plan.passes))
        return stmts + self.taken()

    def taken(self) -> list[Stmt]:
        """Removes and returns the head's statements emitted so far."""
        stmts, self.head.stmts = self.head.stmts, []
        return stmts

    def per_row_values(self, level: int) -> None:
        """Computes the per-row values that wait for at most ``level`` reductions; stores results."""
        for index, node in enumerate(self.plan.nodes):
            if node.per_row and not node.reduces and index not in self.scalars and self.plan.levels[index] <= level:
                self.set_scalar(index, self.compute(node, self.head, self._per_row_operand))

    def set_scalar(self, node: int, computed: Expr) -> None:
        """Sets ``computed`` as the row's value of a node; stores it if it is a result."""
        self.scalars[node] = computed
        if node in self.buffers.outputs:
            stored = self.head.stored(computed, self.plan.nodes[node].dtype)
            self.store_scalar(BufferStore(self.buffers.outputs[node], stored, [self.row]))

    def store_scalar(self, store: Stmt) -> None:
        """Emits the store of a per-row result."""
        self.head.stmts.append(store)

    def _per_row_operand(self, operand: InputElement | Index | NodeElement) -> Expr:
        match operand:
            case NodeElement():
                return self.scalars[operand.node]
            case Index():
                return self.base(operand.access)
        return self.load_scalar(operand)

    def load_scalar(self, read: InputElement) -> Expr:
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
            read: operand → its value in its compute type.
            sections: indices of the unrolled loops over the columns, ``None`` for other loops.
        """
        operands = [self._section(node, sections)] if node.sections else node.operands
        args = self.values(operands, e, read)
        if node.op == "astype":
            return e.bind(converted(e, args[0], self.plan.dtype(node.operands[0]), node.dtype))
        return e.bind(rounded(e, RULES[node.op](e, *args), node.dtype, node.op))

    def values(self, operands: Sequence[Operand], e: Emitter, read: Callable[[Operand], Expr]) -> list[Expr]:
        """The values of operands; ``read`` loads operands that are not numbers."""
        return [self._number(each, e) if isinstance(each, Literal | Passed) else read(each) for each in operands]

    def _number(self, operand: Literal | Passed, e: Emitter) -> Expr:
        """A number in every lane, in its compute type. A launch argument is converted once per row, through float64 as
        torch converts Python numbers."""
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
        """Whether the loop over this extent of the columns is unrolled for a concatenation's sections."""
        return any(axis in dict(concat.sections) for concat in self.plan.concats)

    def _section(self, concat: Compute, turns: Sequence[int | None]) -> Operand:
        """The operand that a concatenation reads in an iteration; ``None`` for loops that are not unrolled."""
        return concat.operands[sum(turns[axis] * count for axis, count in concat.sections)]


class PassStep:
    """Target-independent emission state of one step of a pass: computes each node and loads each operand once.

    Attributes:
        index: of the pass.
        e: emits the step's code.
        at: the step's coordinate in each loop over the columns; in the last loop, its first lane's.
        sections: see :meth:`RowValues.compute`.
    """

    def __init__(
        self, scope: RowValues, index: int, e: Emitter, at: Sequence[Expr], sections: Sequence[int | None]
    ) -> None:
        self.scope, self.plan, self.index, self.e = scope, scope.plan, index, e
        self.at, self.sections = at, sections
        self._values: dict[int, Expr] = {}
        self._loads: dict[InputElement, Expr] = {}

    def _compute(self, node: int) -> Expr:
        """A node's elementwise value at this step."""
        raise NotImplementedError

    def _load(self, read: InputElement) -> Expr:
        """An input's element at this step, in its compute type."""
        raise NotImplementedError

    def _index(self, access: Access) -> Expr:
        """An element's index, as a value."""
        raise NotImplementedError

    def _value(self, node: int) -> Expr:
        """:meth:`_compute`, at most once per node."""
        if node not in self._values:
            self._values[node] = self._compute(node)
        return self._values[node]

    def _read(self, operand: InputElement | Index | NodeElement) -> Expr:
        """An operand at this step, in its compute type."""
        if isinstance(operand, Index):
            return self._index(operand.access)
        if isinstance(operand, NodeElement):
            known = self.scope.scalars.get(operand.node)
            return self._value(operand.node) if known is None else self.e.broadcast(known)
        if operand not in self._loads:
            self._loads[operand] = self._load(operand)
        return self._loads[operand]

    def first(self, access: Access) -> Expr:
        """Index of the first lane's element."""
        index, number = self.scope.base(access), self.scope.number
        for coordinate, stride in zip(self.at, access.columns, strict=True):
            if stride:
                index = index + coordinate * number(stride)
        return index
