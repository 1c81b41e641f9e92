"""Planning of row kernels: a group of nodes → its passes over a row, as a :class:`RowPlan` and launch arguments."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from autodiff.extents import Dim, Extent, divides, maximum, minimum, same, sample_of
from autodiff.ir import compute_type, itemsize
from bridge.compile.codegen.pointwise import EXPENSIVE, MASKS
from bridge.compile.loop_ir.graph import Concat, Node, Operand, Pad, Pointwise, Reduction, Scalar, Value
from bridge.compile.loop_ir.operations import Argument, Number
from bridge.compile.schedule.access import Arguments, Space, access
from bridge.compile.schedule.fuse import Group, space_of
from bridge.compile.schedule.limits import Rules
from bridge.compile.schedule.order import chunk_rows
from bridge.compile.schedule.row_plan import (
    Compute,
    Index,
    InputElement,
    Literal,
    NodeElement,
    Passed,
    RowPass,
    RowPlan,
    Walk,
)
from bridge.compile.schedule.row_plan import Operand as PlannedOperand

__all__ = ["PassContents", "Planned", "RecomputePolicy", "levels_of", "plan_passes", "plan_rows"]

Plan = TypeVar("Plan")


@dataclass(frozen=True, eq=False)
class Planned(Generic[Plan]):
    """One launch of a plan, or of its kernel: tensors in the order of the kernel's parameters, then the integers, which
    a descriptor points to as int64, if there are any.

    ``scratch``: partials of column reductions, and row buffers; ``ops``: the operators, in order.
    """

    plan: Plan
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    scratch: tuple[Value, ...]
    scalars: tuple[Dim, ...]
    ops: tuple[str, ...]


@dataclass(frozen=True)
class PassContents:
    """One pass, as nodes and values of the group; see :class:`bridge.compile.schedule.row_plan.RowPass`."""

    reductions: tuple[Reduction, ...]
    stores: tuple[Value, ...]
    cached: tuple[Value, ...]

    @property
    def roots(self) -> list[Value]:
        """The values that the pass must compute."""
        return [node.operand.value for node in self.reductions] + [*self.stores, *self.cached]


def levels_of(nodes: Iterable[Node]) -> dict[Value, int]:
    """Each result → the number of successive row reductions that it waits for."""
    levels: dict[Value, int] = {}
    for node in nodes:
        level = max((levels.get(op.value, 0) for op in node.operands if isinstance(op, Operand)), default=0)
        levels[node.out] = level + (isinstance(node, Reduction) and same(node.inner, 1))
    return levels


@dataclass(frozen=True)
class RecomputePolicy:
    """Which values a later pass recomputes instead of finding them cached.

    Attributes:
        cheap: maximum number of operations.
        cheap_shared: the same for values made only of tensors of at most ``columns`` elements, which all rows share,
            such as casts of a LayerNorm's weights: they are read from the nearest cache, whereas cached values would
            take registers away from threads that wait for memory.
        columns: elements of a row.
    """

    cheap: int
    cheap_shared: int
    columns: Dim


def plan_passes(
    group: Group, stored: Collection[Value], levels: Mapping[Value, int], recomputed: RecomputePolicy
) -> list[PassContents]:
    """The passes of a group; ``stored``: its values to be written to memory."""
    return _Passes(group, stored, levels, recomputed).plan()


class _Passes:
    def __init__(
        self, group: Group, stored: Collection[Value], levels: Mapping[Value, int], recomputed: RecomputePolicy
    ) -> None:
        self.recomputed = recomputed
        self.group = group
        self.stored = stored
        self.levels = levels

    def plan(self) -> list[PassContents]:
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
            roots = PassContents(tuple(reductions[index]), tuple(stores[index]), tuple(caches[index])).roots
            for value in self._wanted(roots, index):
                if value not in cached and not self._cheap(value, cached):
                    cached.add(value)
                    caches[self.levels[value]].append(value)
        return list(map(PassContents, map(tuple, reductions), map(tuple, stores), map(tuple, caches)))

    def _wanted(self, roots: Iterable[Value], index: int) -> list[Value]:
        """Elementwise values of earlier passes that pass ``index`` reads and that are not in memory."""
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
        """Whether recomputation takes few operations and few loads."""
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
            if node.op in EXPENSIVE:
                return False
            cost += node.op != "copy"
            stack += [operand.value for operand in node.operands if isinstance(operand, Operand)]
        is_shared = all(self._is_shared(load) for load in loads)
        return cost <= (self.recomputed.cheap_shared if is_shared else self.recomputed.cheap) and len(loads) <= 2

    def _is_shared(self, value: Value) -> bool:
        columns = self.recomputed.columns
        if isinstance(columns, Extent) or isinstance(value.numel, Extent):
            return same(value.numel, columns)
        return value.numel <= columns


def plan_rows(group: Group, stored: Collection[Value], rules: Rules) -> Planned[RowPlan]:
    """The plan of a group; ``stored``: its values to be written to memory."""
    space = space_of(group, rules)
    if space is None:
        raise AssertionError("a group without common loop extents was formed")
    return _Planner(group, stored, space, rules).plan()


class _Planner:
    def __init__(self, group: Group, stored: Collection[Value], space: Space, rules: Rules) -> None:
        self.limits, self.order = rules.limits, rules.order
        self.group = group
        self.space = space
        self.arguments = Arguments()
        self.inputs = {value: index for index, value in enumerate(dict.fromkeys(op.value for _, op in group.reads()))}
        self.index = {node.out: index for index, node in enumerate(group.nodes)}
        self.outputs = tuple(out for out in self.index if out in stored)
        self.scratch: tuple[Value, ...] = ()
        self.reduces = any(isinstance(node, Reduction) for node in group.nodes)
        self.lanes = self._lanes()

    def plan(self) -> Planned[RowPlan]:
        group = self.group
        levels, limits = levels_of(group.nodes), self.limits
        is_known = not isinstance(self.space.column_count, Extent)
        cheap = limits.recompute.cheap_in_known_rows if is_known else limits.recompute.cheap_operations
        recomputed = RecomputePolicy(cheap, max(cheap, limits.recompute.cheap_shared), self.space.column_count)
        passes = tuple(
            RowPass(self._at(node.out for node in done.reductions), self._at(done.stores), self._at(done.cached))
            for done in plan_passes(group, self.outputs, levels, recomputed)
        )
        self.fixed = (
            self.space.flat
            or len(self.space.columns) == 1
            or any(isinstance(node, Reduction | Concat) for node in group.nodes)
            or any(done.cached for done in passes)
        )
        walk = self._flat_walk() if self.space.flat else self._walk()
        largest = max((sample_of(value.numel) for value in (*self.inputs, *self.outputs)), default=1)
        nodes = tuple(map(self._compute, group.nodes))
        if any(node.reduces == "row" for node in nodes):
            walk = replace(walk, block_turns=self.order.blocked(self.space.column_count))
        plan = RowPlan(
            tuple(value.dtype for value in self.inputs),
            nodes,
            self._at(self.outputs),
            tuple(levels[node.out] for node in group.nodes),
            passes,
            *self._columns(),
            self._row_buffers(passes, walk),
            walk,
            "int64" if largest >= 2**31 else "int32",
            len(self.arguments.numbers),
            self.lanes,
            self.order.possible_accumulators(self.space.column_count) if self.reduces else (1,),
            self._small(),
        )
        ops = tuple(node.op for node in group.nodes)
        return Planned(plan, tuple(self.inputs), self.outputs, self.scratch, tuple(self.arguments.numbers), ops)

    def _lanes(self) -> int:
        """Lanes of a vector; without reductions, enough for a whole access of each large tensor, or 1."""
        lanes, limits, elements = self.order.lanes, self.limits, self.group.elements
        if self.reduces:
            return lanes
        if not isinstance(elements, Extent) and elements <= limits.rows.single_elements:
            return 1
        values, elements = (*self.inputs, *self.outputs), sample_of(elements)
        widest = max(
            (itemsize(each.dtype) for each in values if sample_of(each.numel) * limits.recompute.free_reads > elements),
            default=4,
        )
        accesses = 2 if any(getattr(node, "op", None) in MASKS for node in self.group.nodes) else 1
        return max(lanes, min(2 * lanes, accesses * limits.rows.access_bytes // widest))

    def _at(self, values: Iterable[Value]) -> tuple[int, ...]:
        return tuple(map(self.index.__getitem__, values))

    def _add(self, number: Dim, name: Hashable) -> Argument:
        return self.arguments.add(number, name)

    def _columns(self) -> tuple[tuple[Number, ...], Number]:
        """The extents inside a row, and the row's length."""
        last = len(self.space.columns) - 1
        extents = tuple(
            self._number(extent, ("column extent", axis), self.fixed or axis == last)
            for axis, extent in enumerate(self.space.columns)
        )
        return extents, self._number(self.space.column_count, "columns", self.fixed)

    def _number(self, number: Dim, name: Hashable, fixed: bool) -> Number:
        return self.arguments.known(number, name) if fixed else self._add(number, name)

    def _row_buffers(self, passes: Sequence[RowPass], walk: Walk) -> Argument | None:
        """Scratch memory for cached values if only the launch knows the row length: one row per task."""
        length = self.space.column_count
        cached = [self.group.nodes[node].out for each in passes for node in each.cached]
        if not cached or not isinstance(length, Extent):
            return None
        tasks = 1 if walk.tasks is None else self.arguments.numbers[walk.tasks.index]
        row = (length + self.order.lanes - 1) // self.order.lanes * self.order.lanes
        self.scratch += tuple(Value("row", (tasks * row,), compute_type(out.dtype)) for out in cached)
        return self._add(row, "row buffer")

    def _walk(self) -> Walk:
        """The walk over rows of one length. The reduction order fixes the tasks of column reductions, else the work."""
        reduced = [node for node in self.group.nodes if isinstance(node, Reduction) and not same(node.inner, 1)]
        batch = self.group.batch if reduced else 1
        rows, columns = self.space.row_count // batch, self.space.column_count
        chunks = (
            self.order.column_chunks(rows, columns) if reduced else maximum(1, minimum(self.limits.rows.tasks, rows))
        )
        parallel = not same(chunks * batch, 1) and self._profitable()
        if parallel is False and not reduced:
            return Walk(self._add(rows, "rows"))
        size = chunk_rows(rows, chunks)
        chunks = (rows + size - 1) // size
        parts = batch * chunks * (2 if self.order.block_rows else 1) * columns
        self.scratch = tuple(Value("partial", (parts,), compute_type(node.out.dtype)) for node in reduced)
        finished = sum(node.out in self.outputs for node in reduced) * batch * chunks * columns
        return Walk(
            self._add(rows, "rows"),
            self._add(size, "task rows"),
            self._add(chunks, "chunks"),
            self._add(chunks * batch, "tasks"),
            self.order.block_rows if reduced else 0,
            batched=not same(batch, 1),
            batches=1 if same(batch, 1) else self._add(batch, "batches"),
            parallel=parallel,
            parallel_second_stage=parallel
            and self.arguments.reaches(finished, self.limits.threads.parallel_second_stage, "parallel finish"),
        )

    def _flat_walk(self) -> Walk:
        """The walk over a space without rows: vectors, in rows of an arbitrary length, then the remaining elements."""
        elements = self.group.elements
        vectors, tail = divmod(elements, self.lanes)
        rows = (vectors * self.lanes + self.space.column_count - 1) // self.space.column_count
        nothing = same(tail, 0)
        where = None if nothing else (self._add(elements - tail, "tail"), self._add(tail, "tail's elements"))
        count = self._add(vectors, "vectors")
        chunks = maximum(1, minimum(self.limits.rows.tasks, rows))
        parallel = not same(chunks, 1) and self._profitable()
        if parallel is False:
            return Walk(self._add(rows, "rows"), vectors=count, tail=where)
        size = chunk_rows(rows, chunks)
        chunks = self._add((rows + size - 1) // size, "chunks")
        return Walk(
            self._add(rows, "rows"),
            self._add(size, "task rows"),
            chunks,
            chunks,
            parallel=parallel,
            vectors=count,
            tail=where,
        )

    def _compute(self, node: Node) -> Compute:
        per_row = node in self.group.per_row
        scale = self.space.column_count if per_row else 1
        operands = tuple(self._operand(operand, scale) for operand in node.operands)
        if isinstance(node, Reduction):
            reduces = "row" if same(node.inner, 1) else "column"
            return Compute(node.op, operands, node.out.dtype, reduces == "row", reduces)
        sections = self._sections(node) if isinstance(node, Concat) else ()
        behind = node.out.shape[-1] - node.columns if isinstance(node, Pad) else 0
        return Compute(node.op, operands, node.out.dtype, per_row, sections=sections, behind=behind)

    def _sections(self, node: Concat) -> tuple[tuple[int, int], ...]:
        """``(axis, count)`` of the loops inside a row over sections, and the number of sections per iteration."""
        walked: list[tuple[int, int]] = []
        for axis in range(len(self.space.columns) - 1):
            turn = math.prod(self.space.columns[axis + 1 :])
            count = turn // node.inner if divides(node.inner, turn) else 0
            if isinstance(count, int) and 0 < count < len(node.operands):
                walked.append((axis, count))
        return tuple(walked)

    def _operand(self, operand: Operand | Scalar, scale: Dim) -> PlannedOperand:
        if isinstance(operand, Scalar) and isinstance(operand.number, Extent):
            return Passed(self._add(operand.number, ("number", operand.number)), operand.dtype)
        if isinstance(operand, Scalar):
            return Literal(repr(operand.number), operand.dtype, operand.number)
        if operand.value in self.index:
            return NodeElement(self.index[operand.value])
        there = access(self.space, operand, scale, self.arguments, fixed=self.fixed)
        return Index(there) if operand.value.source == "index" else InputElement(self.inputs[operand.value], there)

    def _small(self) -> bool:
        elements = self.space.row_count * self.space.column_count
        return self.reduces and not isinstance(elements, Extent) and elements <= self.order.small_rows

    def _profitable(self) -> bool | Argument:
        """Whether threads pay for the group, by a rough count of its scalar operations."""
        total: Dim = 0
        for node in self.group.nodes:
            size = node.operand.view.numel if isinstance(node, Reduction) else node.out.numel
            heavy = isinstance(node, Pointwise) and node.op in EXPENSIVE
            total += size * (self.limits.threads.transcendental_work if heavy else 1)
        return self.arguments.reaches(total, self.limits.threads.parallel_work, "parallel")
