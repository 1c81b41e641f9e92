"""Plan of a row kernel: a group along rows -> its passes over a row, what each computes and keeps.

Row plan: how one kernel walks the rows of its iteration space, as plain data for any emitter.
A row is walked in *passes*: pass ``k`` computes what depends on ``k`` reductions of the row one after another (softmax:
maximum; exponentials and their sum; the product). A value's *level* is the number of reductions it waits for. An
elementwise value that a later pass needs again is read back from where it was stored, recomputed if that is cheap, or
cached in a row buffer.

Example, a softmax over rows of 64 whose only stored value is the result: three passes, whose reductions are ``max``,
``sum`` and none; the exponentials are cached in a row buffer by the second pass, and the third stores the result.

A plan holds no tensor, and of the numbers only those that its code is made for: the columns of a row, steps between
neighbouring elements. Offsets, strides between rows and numbers of rows are launch arguments, so equal plans are one
kernel: of all time steps of a loop, all layers, all batch sizes. What is known only when a program is bound is a launch
argument everywhere: a row's length, too, and a step. :mod:`bridge.compile.schedule.plan_rows` makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tvm import tirx
from tvm.tirx import Buffer, BufferLoad, BufferStore, Expr, IfThenElse, Stmt

from bridge.compile.codegen.emit import Emitter, element_type
from bridge.compile.codegen.pointwise import RULES, compute_type
from bridge.compile.codegen.tir import LaunchArguments, converted, rounded, sequence
from bridge.compile.loop_ir.operations import Access, Argument, Number, Term

__all__ = ["Compute", "Index", "InputElement", "KernelBuffers", "Literal", "NodeElement", "Operand", "PassStep"]
__all__ += ["Passed", "RowPass", "RowPlan", "RowValues", "Walk"]


@dataclass(frozen=True)
class InputElement:
    """An element of the kernel's input of that index."""

    tensor: int
    access: Access


@dataclass(frozen=True)
class Index:
    """Where an element would be read in a tensor: the index itself, of the plan's index type."""

    access: Access


@dataclass(frozen=True)
class NodeElement:
    """The element that the plan's node of that index makes at the same place."""

    node: int


@dataclass(frozen=True)
class Literal:
    """A number; two are equal if they are spelled alike (``0.0`` and ``-0.0`` are two, one nan is one)."""

    spelled: str
    dtype: str
    number: float | int | bool = field(compare=False)


@dataclass(frozen=True)
class Passed:
    """A launch argument as a number of an element type: a size that is computed with."""

    argument: Argument
    dtype: str


Operand = InputElement | Index | NodeElement | Literal | Passed


@dataclass(frozen=True)
class Compute:
    """One operation.

    Attributes:
        dtype: of the result, as stored.
        per_row: whether there is one result per row, not one per element: a reduction of the row, arithmetic on those.
        reduces: ``"row"``, ``"column"`` or nothing.
        sections: ``(axis, count)`` of each loop inside a row that walks the sections of a concatenation, its operands,
            so many in a turn; none for others.
        behind: zeros that are stored behind each row of the result.
        places: where each operand is stored, of a concatenation that is written section by section; none for others.
    """

    op: str
    operands: tuple[Operand, ...]
    dtype: str
    per_row: bool = False
    reduces: str = ""
    sections: tuple[tuple[int, int], ...] = ()
    behind: int = 0
    places: tuple[Access, ...] = ()


@dataclass(frozen=True)
class RowPass:
    """One pass over the row; all are indices of nodes.

    Attributes:
        reductions: accumulated; row reductions are complete at its end.
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
    """In which order, and by how many threads, the rows are walked: ``tasks`` tasks of ``task_rows`` rows.

    Attributes:
        rows: of one batch. Column reductions do not reduce the leading extent of that name (``batched``: it is not 1).
        task_rows, chunks, tasks: rows of a task but the last of a batch, tasks per batch, tasks; none is empty.
            ``None``: a single task.
        block_rows: of column reductions, see :class:`~bridge.compile.schedule.order.ReductionOrder`; 0: no blocks.
            Their scratch memory has a row for each task, and as many behind them for the blocks.
        parallel: whether the tasks are worth starting threads for; ``parallel_second_stage``: also the sums over the
            tasks. An argument, 0 if not, where a launch's sizes decide.
        vectors: of the elements of a flat space, whose last row may be shorter; ``None`` for other spaces.
        tail: index of the first element, and number of elements, behind the vectors of a flat space; ``None``: none.
    """

    rows: Number
    task_rows: Number | None = None
    chunks: Number | None = None
    tasks: Number | None = None
    block_rows: int = 0
    batched: bool = False
    batches: Number = 1
    parallel: bool | Argument = False
    parallel_second_stage: bool | Argument = False
    vectors: Argument | None = None
    tail: tuple[Argument, Argument] | None = None


@dataclass(frozen=True)
class RowPlan:
    """How one kernel walks the rows of its space. ``plan`` is equal for kernels of equal code.

    Attributes:
        inputs: element types of the tensors it reads.
        nodes: what it computes, in order.
        outputs: the nodes whose values are written to memory.
        levels: of each node's value, the row reductions it waits for.
        passes: over each row, in order.
        columns: loop extents inside a row, vectors along the last; all that are known are numbers where reductions, row
            buffers or the sections of a concatenation are made for them, otherwise only the last.
        length: elements of a row.
        buffer_row: elements of a row buffer in scratch memory, one for each task; ``None``: they are on the stack.
        walk: over the rows.
        index_type: the integer type that reaches every element.
        arguments: how many integers a launch passes.
        lanes: of a vector.
        accumulators: in how many vectors a reduction is accumulated, in turn: the first number that divides the vectors
            of the row. 1 where there is none.
        small: whether something is reduced and all rows together have few elements, see
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
        """Nodes that reduce over the rows; their partial results are accumulated per task."""
        return [index for index, node in enumerate(self.nodes) if node.reduces == "column"]

    @property
    def finished(self) -> list[int]:
        """Those whose results are wanted in memory."""
        return [node for node in self.column_reductions if node in self.outputs]

    @property
    def reads(self) -> set[InputElement]:
        """All that is read from memory."""
        return {each for node in self.nodes for each in node.operands if isinstance(each, InputElement)}

    @property
    def cached(self) -> list[int]:
        """Nodes with a row buffer."""
        return [node for each in self.passes for node in each.cached]

    @property
    def concats(self) -> Iterator[Compute]:
        """Nodes whose sections the loops over the columns are unrolled for."""
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


class PassStep:
    """Emission state of one step of a pass that no target changes: each node's value and each operand's load once.

    Attributes:
        index: of the pass.
        e: emits the step's code.
        at: the step's coordinate in each loop over the columns; of its first lane in the last one.
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
        """An element's index itself."""
        raise NotImplementedError

    def _value(self, node: int) -> Expr:
        """:meth:`_compute`, once."""
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
