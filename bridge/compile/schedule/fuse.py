"""Fusion: the loop graph → groups of nodes that share a kernel, in an order of execution.

A group iterates over one space of ``rows * columns`` elements. Its members are

* *elementwise* nodes: point-wise nodes of that many elements, and reductions over them;
* *per-row* nodes: point-wise nodes with one element per row (arithmetic on the results of row reductions).

Two groups merge if one feeds the other (or both read the same large tensor), if every element is produced and consumed
at the same place of the iteration space, and if no path leaves the merged group and comes back. So softmax, LayerNorm,
their backwards and the point-wise work around them become one kernel, with any number of results.

**Grouping never changes a bit of any value.** Every node has its own rule: point-wise nodes in strict IEEE arithmetic,
rounded to the type of their result, and reductions in an order that follows from their extents alone
(:mod:`bridge.compile.schedule.order`). The choice of stored results, recomputed values and kernels is therefore free:
one more result adds a store, and can regroup, without changing the others.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from autodiff.extents import Dim, Extent, divides, same, same_shape, sample_of
from bridge.compile.loop_ir.graph import (
    Concat,
    Graph,
    KernelCall,
    LibraryCall,
    Node,
    Operand,
    Pad,
    Pointwise,
    Product,
    Reduction,
    Value,
)
from bridge.compile.loop_ir.views import View, merged
from bridge.compile.schedule.access import Space, make_space
from bridge.compile.schedule.limits import Rules

__all__ = ["Group", "fuse"]


@dataclass(eq=False)
class Group:
    """Nodes that run as one step, in order.

    ``elements``: size of the iteration space; ``columns``: its trailing extent, ``None`` if open; ``batch``: leading
    extent that column reductions do not reduce. A library call or a kernel call is alone in its group.
    """

    index: int
    nodes: list[Node]
    elements: Dim
    columns: Dim | None = None
    batch: Dim | None = None
    per_row: set[Node] = field(default_factory=set)  # members with one element per row
    made: dict[Value, Node] = field(default_factory=dict)
    sources: set[Group] = field(default_factory=set)  # groups whose values this one reads
    users: set[Group] = field(default_factory=set)  # groups that read this one's values
    last: int = 0  # place of the last node of the group and its dependencies; ``index``: of the group's first node
    end: int = 0  # place of the group's last node
    fusable: bool = True

    def is_per_row(self, value: Value) -> bool:
        """Whether a value is a member's, with one element per row."""
        node = self.made.get(value)
        return node in self.per_row or (isinstance(node, Reduction) and same(node.inner, 1))

    def reads(self) -> list[tuple[Node, Operand]]:
        """Operands read from memory outside the group, with their nodes."""
        return [
            (node, operand)
            for node in self.nodes
            for operand in node.operands
            if isinstance(operand, Operand) and operand.value not in self.made and operand.value.source != "index"
        ]


def _single(index: int, node: Node, rules: Rules) -> Group:
    match node:
        case Concat():
            group = Group(index, [node], node.out.numel, node.inner * len(node.operands))
        case Pad():
            group = Group(index, [node], node.operands[0].view.numel, node.columns)
        case Pointwise():
            group = Group(index, [node], node.out.numel)
        case Reduction() if same(node.inner, 1):
            group = Group(index, [node], node.operand.view.numel, node.reduced)
        case Reduction():
            group = Group(index, [node], node.operand.view.numel, node.inner, node.outer)
            one_chunk = same(rules.order.column_chunks(node.reduced, node.inner), 1)
            few = sample_of(group.elements) <= rules.limits.threads.serial_elements // 2
            group.fusable = not one_chunk or (same(node.outer, 1) and few)
        case LibraryCall() | KernelCall() | Product():
            group = Group(index, [node], 0, fusable=False)
    group.made = {out: node for out in node.outs}
    group.fusable = group.fusable and not same(group.elements, 0)
    return group


def is_row_read(operand: Operand, rows: Dim, columns: Dim) -> bool:
    """Whether an operand is one dense value per row: constant along each row, stride 1 from row to row."""
    wanted = [(extent, stride) for extent, stride in ((rows, 1), (columns, 0)) if not same(extent, 1)]
    if not same(operand.view.offset, 0) or not same(operand.value.numel, rows):
        return False
    found = merged(operand.view)
    return len(found) == len(wanted) and all(map(same_shape, found, wanted))


def _aligned(operand: Operand) -> bool:
    return same(operand.view.offset, 0) and operand.is_whole


class _Fuser:
    def __init__(self, graph: Graph, rules: Rules) -> None:
        self.graph = graph
        self.rules = rules
        self.position = {node: index for index, node in enumerate(graph.nodes)}
        self.group_of: dict[Value, Group] = {}
        self.readers: dict[Value, set[Group]] = defaultdict(set)
        self.groups: set[Group] = set()

    def run(self) -> list[Group]:
        for index, node in enumerate(self.graph.nodes):
            group = _single(index, node, self.rules)
            group.sources = {self.group_of[op.value] for _, op in group.reads() if op.value in self.group_of}
            group.last, group.end = max([index, *(source.last for source in group.sources)]), index
            for source in group.sources:
                source.users.add(group)
            self._own(group)
            if group.fusable:
                for candidate in self._candidates(group):
                    if candidate in self.groups and group in self.groups:
                        group = self._merge(candidate, group) or group
        return self._ordered()

    def _own(self, group: Group) -> None:
        self.groups.add(group)
        for value in group.made:
            self.group_of[value] = group
        for _, operand in group.reads():
            self.readers[operand.value].add(group)

    def _candidates(self, group: Group) -> list[Group]:
        feeding = sorted((g for g in group.sources if g.fusable), key=lambda g: -g.index)
        sharing = {
            other
            for _, operand in group.reads()
            if sample_of(operand.value.numel) >= self.rules.limits.kernel.shared_elements
            for other in self.readers[operand.value]
            if other is not group and other.fusable and other not in group.sources
        }
        return feeding + sorted(sharing, key=lambda g: -g.index)

    def _merge(self, first: Group, second: Group) -> Group | None:
        """The union of two groups, of which ``second`` may read ``first``; ``None`` if they cannot share a kernel."""
        limits = self.rules.limits
        if len(first.nodes) + len(second.nodes) > limits.kernel.nodes:
            return None
        union = _union(first, second, self.position, self.rules)
        if union is None or _reaches(second, first) or _reaches(first, second):  # through a third group
            return None
        if len({operand.value for _, operand in union.reads()}) + len(union.made) > limits.kernel.buffers:
            free = {operand.value for _, operand in union.reads()}
            if len(free) > limits.kernel.buffers // 2:
                return None
        if all(node.op == "add" for node in union.nodes) and len(union.reads()) > limits.kernel.terms:
            return None
        if space_of(union, self.rules) is None:
            return None
        both = {first, second}
        union.last, union.end = max(first.last, second.last), max(first.end, second.end)
        union.sources, union.users = (first.sources | second.sources) - both, (first.users | second.users) - both
        for old in both:
            self.groups.discard(old)
            for _, operand in old.reads():
                self.readers[operand.value].discard(old)
        for source in union.sources:
            source.users = (source.users - both) | {union}
        for user in union.users:
            user.sources = (user.sources - both) | {union}
        _end_behind(union)
        self._own(union)
        return union

    def _ordered(self) -> list[Group]:
        """Groups in execution order; ties by the place of their last node.

        With the first node's place, a kernel that casts a gradient early and adds it to a late one would pull the late
        one's producers forward, and other gradients, which wait for nothing, to the end.
        """
        done: dict[Group, None] = {}
        stack = sorted(self.groups, key=lambda g: -g.end)
        while stack:
            group = stack[-1]
            missing = [source for source in group.sources if source not in done]
            if missing:
                stack.extend(sorted(missing, key=lambda g: -g.end))
            else:
                stack.pop()
                done.setdefault(group)
        return list(done)


def _end_behind(group: Group) -> None:
    """Updates ``last`` of the groups that depend on a group."""
    stack = list(group.users)
    while stack:
        user = stack.pop()
        if user.last < group.last:
            user.last = group.last
            stack.extend(user.users)


def _reaches(start: Group, goal: Group) -> bool:
    """Whether ``start`` depends on ``goal`` through a third group, which then ends after ``goal``'s first node."""
    stack = [source for source in start.sources if source is not goal]
    visited: set[Group] = set()
    while stack:
        group = stack.pop()
        if group in visited or group.last < goal.index:
            continue
        visited.add(group)
        if goal in group.sources:
            return True
        stack.extend(group.sources)
    return False


def _union(first: Group, second: Group, position: dict[Node, int], rules: Rules) -> Group | None:
    shape = _common_space(first, second, rules)
    if shape is None:
        return None
    elements, columns = shape
    batches = {group.batch for group in (first, second) if group.batch is not None}
    if len(batches) > 1:
        return None
    nodes = sorted(first.nodes + second.nodes, key=position.__getitem__)
    union = Group(min(first.index, second.index), nodes, elements, columns, next(iter(batches), None))
    union.made = {**first.made, **second.made}
    for group in (first, second):
        union.per_row |= group.per_row if same(group.elements, elements) else set(group.nodes)
    if union.batch is not None and columns is not None and not divides(union.batch, elements // columns):
        return None
    for group, other in ((first, second), (second, first)):
        # A group's own reads were checked for this iteration space when it was made.
        alike_space = same(group.elements, elements) and (group.columns is None) == (columns is None)
        own = () if alike_space and (columns is None or same(group.columns, columns)) else group.made
        for node in group.nodes:
            for operand in node.operands:
                if not isinstance(operand, Operand) or (operand.value not in other.made and operand.value not in own):
                    continue
                if not _crosses(union, node, operand):
                    return None
    return union


def _common_space(first: Group, second: Group, rules: Rules) -> tuple[Dim, Dim | None] | None:
    """``(elements, columns)`` of the common iteration space; ``None`` if there is none."""
    if same(first.elements, second.elements):
        if first.columns is None or second.columns is None or same(first.columns, second.columns):
            return first.elements, first.columns if second.columns is None else second.columns
        return None
    small, large = sorted((first, second), key=lambda group: sample_of(group.elements))
    if small.columns is not None or not divides(small.elements, large.elements):
        return None
    columns = large.elements // small.elements
    if large.columns is not None and not same(large.columns, columns):
        return None
    # Rows that no other node requires should be long enough for a vector loop.
    if large.columns is None and (isinstance(columns, Extent) or columns < rules.order.lanes):
        return None
    if large.columns is None and first not in second.sources and second not in first.sources:
        return None
    # One long row would leave no parallelism.
    if sample_of(small.elements) < 8 and sample_of(large.elements) > rules.limits.threads.serial_elements:
        return None
    return large.elements, columns


def _crosses(group: Group, node: Node, operand: Operand) -> bool:
    """Whether ``node`` reads a member's value at the same place of the iteration space."""
    producer = group.made[operand.value]
    if isinstance(producer, Pad) or (isinstance(producer, Reduction) and not same(producer.inner, 1)):
        return False  # complete only after all rows
    row_value = producer in group.per_row or isinstance(producer, Reduction)
    if not row_value:
        return node not in group.per_row and _aligned(operand)
    rows = group.elements // group.columns
    if node in group.per_row:
        return _aligned(operand)
    return is_row_read(operand, rows, group.columns)


def space_of(group: Group, rules: Rules) -> Space | None:
    """The loop extents of a group; ``None`` if its accesses have no common ones."""
    accesses = []
    for node in group.nodes:
        scale = group.columns if node in group.per_row else 1
        accesses += [(operand.view, scale) for operand in node.operands if isinstance(operand, Operand)]
        if isinstance(node, Concat):
            accesses.append((sections_of(node), 1))
    reductions = [node for node in group.nodes if isinstance(node, Reduction)]
    reduces = any(same(node.inner, 1) for node in reductions)
    of_columns = not all(same(node.inner, 1) for node in reductions)
    if _unrolled(group) > (rules.limits.kernel.summed_sections if of_columns else rules.limits.kernel.sections):
        return None
    return make_space(group.elements, group.columns, accesses, rules, reduces=reduces)


def sections_of(node: Concat) -> View:
    """A view that cuts an iteration space at the bounds of a concatenation's sections."""
    sections = len(node.operands)
    return View((node.out.numel // (sections * node.inner), sections, node.inner), (0, 1, 0))


def _unrolled(group: Group) -> int:
    """The number of copies of a row's code for the sections of its concatenations."""
    concats = [node for node in group.nodes if isinstance(node, Concat)]
    if not concats:
        return 1
    inner = [sample_of(node.inner) for node in concats]
    return max(each * len(node.operands) for each, node in zip(inner, concats, strict=True)) // min(inner)


def fuse(graph: Graph, rules: Rules) -> list[Group]:
    """The groups of a graph in execution order."""
    return _Fuser(graph, rules).run()
