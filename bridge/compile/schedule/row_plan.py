"""Row plan: a fused group → how its kernel walks the rows of the iteration space, as data for any emitter.

A row is walked in *passes*: pass ``k`` computes what depends on ``k`` reductions of the row one after another (softmax:
maximum; exponentials and their sum; the product). A value's *level* is the number of reductions it waits for. An
elementwise value that a later pass needs again is read back from where it was stored, recomputed if that is cheap, or
cached in a row buffer.

Example, a softmax over rows of 64 whose only stored value is the result: three passes, whose reductions are ``max``,
``sum`` and none; the exponentials are cached in a row buffer by the second pass, and the third stores the result.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from bridge.compile.codegen.pointwise import EXPENSIVE
from bridge.compile.loop_ir.graph import Concat, Operand, Pointwise, Reduction, Value
from bridge.compile.schedule.fuse import Group, space_of
from bridge.compile.schedule.reduction import chunk_rows, column_chunks
from bridge.compile.schedule.space import Space

__all__ = ["RowPass", "RowPlan", "plan_rows"]

_CHEAP = 4
"""Operations: a value of so few is recomputed in a later pass instead of cached in a row buffer."""

_PARALLEL_WORK = 250_000  # scalar operations: ten microseconds in vectors, where a launch costs two or three
_EXPENSIVE_WORK = 12  # scalar operations a transcendental function counts for
_MAX_CHUNKS = 64


@dataclass(frozen=True)
class RowPass:
    """One pass over the row.

    Attributes:
        reductions: accumulated; row reductions are complete at its end.
        stores: elementwise values stored to the kernel's results.
        cached: elementwise values cached in a row buffer for later passes.
    """

    reductions: tuple[Reduction, ...] = ()
    stores: tuple[Value, ...] = ()
    cached: tuple[Value, ...] = ()

    @property
    def roots(self) -> list[Value]:
        """What the pass has to compute."""
        return [node.operand.value for node in self.reductions] + [*self.stores, *self.cached]


@dataclass(frozen=True, eq=False)
class RowPlan:
    """How one kernel walks the rows of its space.

    Attributes:
        group: the nodes it computes, in order.
        space: the loop extents.
        inputs: values read from memory.
        stored: members whose values are written to memory.
        levels: of each member's value, the row reductions it waits for.
        passes: over each row, in order.
        batch: leading extent that column reductions do not reduce.
        rows: rows of one batch.
        chunks: tasks per batch, each of :func:`~bridge.compile.schedule.reduction.chunk_rows` rows, none empty.
        parallel: whether the tasks are worth starting threads for.
    """

    group: Group
    space: Space
    inputs: tuple[Value, ...]
    stored: tuple[Value, ...]
    levels: Mapping[Value, int]
    passes: tuple[RowPass, ...]
    batch: int
    rows: int
    chunks: int
    parallel: bool

    @property
    def columns(self) -> int:
        """Elements of a row."""
        return self.space.column_count

    @property
    def column_reductions(self) -> list[Reduction]:
        """Members that reduce over the rows; their partial results are accumulated per task."""
        return [node for node in self.group.nodes if isinstance(node, Reduction) and node.inner != 1]

    @property
    def concats(self) -> list[Concat]:
        """Members whose sections the loops over the columns are unrolled for."""
        return [node for node in self.group.nodes if isinstance(node, Concat)]

    @property
    def index_type(self) -> str:
        """The integer type that reaches every element."""
        largest = max([value.numel for value in (*self.inputs, *self.stored)], default=1)
        return "int64" if largest >= 2**31 else "int32"

    def level(self, value: Value) -> int:
        """The row reductions that a value waits for; 0 for one from memory."""
        return self.levels.get(value, 0)


def plan_rows(group: Group, stored: Collection[Value]) -> RowPlan:
    """The plan of a group whose members ``stored`` are wanted in memory."""
    space = space_of(group)
    if space is None:
        raise AssertionError("a group without common loop extents was formed")
    written = tuple(out for node in group.nodes for out in node.outs if out in stored)
    inputs = tuple(dict.fromkeys(operand.value for _, operand in group.reads()))
    by_columns = any(isinstance(node, Reduction) and node.inner != 1 for node in group.nodes)
    batch = group.batch if by_columns else 1
    rows = space.row_count // batch
    chunks = column_chunks(rows, space.column_count) if by_columns else max(1, min(_MAX_CHUNKS, rows))
    parallel = _work(group) >= _PARALLEL_WORK and chunks * batch > 1
    if not parallel and not by_columns:
        chunks = 1
    chunks = -(-rows // chunk_rows(rows, chunks))
    levels = _levels(group)
    passes = _Passes(group, written, levels).plan()
    return RowPlan(group, space, inputs, written, levels, passes, batch, rows, chunks, parallel)


def _work(group: Group) -> int:
    """Scalar operations of a group, roughly."""
    total = 0
    for node in group.nodes:
        size = node.operand.view.numel if isinstance(node, Reduction) else node.out.numel
        heavy = isinstance(node, Pointwise) and node.op in EXPENSIVE
        total += size * (_EXPENSIVE_WORK if heavy else 1)
    return total


def _levels(group: Group) -> dict[Value, int]:
    levels: dict[Value, int] = {}
    for node in group.nodes:
        level = max((levels.get(op.value, 0) for op in node.operands if isinstance(op, Operand)), default=0)
        levels[node.out] = level + (isinstance(node, Reduction) and node.inner == 1)
    return levels


class _Passes:
    """Assigns reductions and stores to passes, and decides what is cached for later ones."""

    def __init__(self, group: Group, stored: Collection[Value], levels: Mapping[Value, int]) -> None:
        self.group = group
        self.stored = stored
        self.levels = levels

    def plan(self) -> tuple[RowPass, ...]:
        count = 1 + max(self.levels.values(), default=0)
        reductions: list[list[Reduction]] = [[] for _ in range(count)]
        stores: list[list[Value]] = [[] for _ in range(count)]
        caches: list[list[Value]] = [[] for _ in range(count)]
        for node in self.group.nodes:
            if isinstance(node, Reduction):
                reductions[self.levels.get(node.operand.value, 0)].append(node)
            elif node.out in self.stored and node not in self.group.per_row:
                stores[self.levels[node.out]].append(node.out)
        cached: set[Value] = set()
        for index in reversed(range(count)):
            roots = RowPass(tuple(reductions[index]), tuple(stores[index]), tuple(caches[index])).roots
            for value in self._wanted(roots, index):
                if value not in cached and not self._cheap(value, cached):
                    cached.add(value)
                    caches[self.levels[value]].append(value)
        return tuple(map(RowPass, map(tuple, reductions), map(tuple, stores), map(tuple, caches)))

    def _wanted(self, roots: Iterable[Value], index: int) -> list[Value]:
        """Elementwise values of earlier passes that pass ``index`` reads and that are not stored."""
        wanted: dict[Value, None] = {}
        visited: set[Value] = set()
        stack = [root for root in roots if root in self.group.made]
        while stack:
            value = stack.pop()
            if value in visited or self.group.is_per_row(value):
                continue
            visited.add(value)
            if self.levels[value] < index:
                if value not in self.stored:
                    wanted[value] = None
                continue
            node = self.group.made[value]
            stack += [op.value for op in node.operands if isinstance(op, Operand) and op.value in self.group.made]
        return list(wanted)

    def _cheap(self, value: Value, cached: Collection[Value]) -> bool:
        """Whether recomputing takes few operations and few loads."""
        cost, loads = 0, set()
        stack, visited = [value], set()
        while stack:
            current = stack.pop()
            if current in visited or self.group.is_per_row(current):
                continue
            visited.add(current)
            in_memory = current not in self.group.made or (current in self.stored and current != value)
            if in_memory or current in cached:
                loads.add(current)
                continue
            node = self.group.made[current]
            cost += _CHEAP + 1 if node.op in EXPENSIVE else node.op != "copy"
            stack += [operand.value for operand in node.operands if isinstance(operand, Operand)]
        return cost <= _CHEAP and len(loads) <= 2
