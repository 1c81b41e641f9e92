"""Row plan: how one kernel walks the rows of its iteration space, as plain data for any emitter.

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

from collections.abc import Iterator
from dataclasses import dataclass, field

from bridge.compile.loop_ir.access import Access, Argument, Number

__all__ = ["Compute", "Index", "Literal", "Made", "Operand", "Passed", "Read", "RowPass", "RowPlan", "Walk"]


@dataclass(frozen=True)
class Read:
    """An element of the kernel's input of that index."""

    tensor: int
    access: Access


@dataclass(frozen=True)
class Index:
    """Where an element would be read in a tensor: the index itself, of the plan's index type."""

    access: Access


@dataclass(frozen=True)
class Made:
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


Operand = Read | Index | Made | Literal | Passed


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
        parallel: whether the tasks are worth starting threads for; ``parallel_finish``: also the sums over the tasks.
            An argument, 0 if not, where a launch's sizes decide.
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
    parallel_finish: bool | Argument = False
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
    def reads(self) -> set[Read]:
        """All that is read from memory."""
        return {each for node in self.nodes for each in node.operands if isinstance(each, Read)}

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
            case Read():
                return self.inputs[operand.tensor]
            case Index():
                return self.index_type
            case Made():
                return self.nodes[operand.node].dtype
            case Literal() | Passed():
                return operand.dtype
