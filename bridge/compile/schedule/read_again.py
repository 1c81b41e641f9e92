"""Rematerialization across kernels: cheap arithmetic that several kernels read → each computes it, none stores it.

For example, a batch normalization sums up a convolution's result in float32, and subtracts the mean in another kernel.
The float32 values would be written and read, whereas the convolution's result has half as many bytes and is in memory
anyway. No bit changes: the same operators compute each value from the same operands.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from autodiff.extents import same, sample_of
from autodiff.ir import itemsize
from bridge.compile.codegen.pointwise import EXPENSIVE
from bridge.compile.loop_ir.graph import Node, Operand, Pointwise, Reduction, Value, needed
from bridge.compile.schedule.fuse import Group, space_of
from bridge.compile.schedule.limits import Rules

__all__ = ["read_again"]


def read_again(groups: Sequence[Group], results: Iterable[Value], rules: Rules) -> None:
    """Changes groups, in execution order, so that fewer values pass through memory.

    The consumers recompute a large value if that takes at most ``read_again`` cheap operators and no more bytes than
    writing and reading it, from values that are small or in memory anyway; and if all of its consumers can.
    """
    if rules.limits.recompute.read_again:
        _Pass(groups, results, rules).run()


class _Pass:
    """Attributes: ``kept``, values that stay in memory; ``made``, the node of each value that a generated kernel makes;
    ``copies``, by group: recomputed value → its copy there."""

    def __init__(self, groups: Sequence[Group], results: Iterable[Value], rules: Rules) -> None:
        self.groups, self.rules, self.results = groups, rules, set(results)
        self.kept = set(self.results)
        self.made: dict[Value, Node] = {}
        self.group_of: dict[Value, Group] = {}
        self.readers: dict[Value, set[Group]] = defaultdict(set)
        self.copies: dict[Group, dict[Value, Value]] = defaultdict(dict)
        for group in groups:
            self.made.update(group.made)
            self.group_of.update(dict.fromkeys(group.made, group))
            for _, operand in group.reads():
                self.readers[operand.value].add(group)
                if not group.fusable:
                    self.kept.add(operand.value)
            if not group.fusable:
                self.kept.update(group.made)

    def run(self) -> None:
        for group in self.groups:
            for value in list(group.made) if group.fusable else ():
                is_large = sample_of(value.numel) > self.rules.limits.rows.single_elements
                if is_large and value not in self.kept and self.readers[value]:
                    if not self._compute_where_read(value):
                        self.kept.add(value)
        self._drop_unread()
        for group in self.groups:
            group.sources = {self.group_of[each.value] for _, each in group.reads() if each.value in self.group_of}
            group.users = set()
        for group in self.groups:
            for source in group.sources:
                source.users.add(group)

    def _drop_unread(self) -> None:
        """Drops values that all consumers recompute from their groups, and rows that only they needed.

        A group without any consumer stays as it is: linking leaves it out.
        """
        wanted = set(self.results)
        for group in reversed(self.groups):
            if wanted.isdisjoint(group.made):
                continue
            if group.fusable:
                _keep(group, wanted)
            wanted.update(operand.value for _, operand in group.reads())

    def _compute_where_read(self, value: Value) -> bool:
        """Lets a value's consumers recompute it if that is profitable; returns whether it is."""
        chain = self._chain(value)
        if chain is None:
            return False
        nodes, sources = chain
        readers = sorted(self.readers[value], key=lambda group: group.index)
        known = {group: {operand.value for _, operand in group.reads()} for group in readers}
        more = sum(_bytes(source) for group in readers for source in sources if source not in known[group])
        if more > (1 + len(readers)) * _bytes(value):
            return False
        changed = [self._with_copies(group, nodes) for group in readers]
        if None in changed:
            return False
        for group, (new, copies) in zip(readers, changed, strict=True):
            group.nodes, group.made, group.per_row = new.nodes, new.made, new.per_row
            self.copies[group].update(copies)
            for copy in copies.values():
                self.group_of[copy], self.made[copy] = group, new.made[copy]
            for _, operand in group.reads():
                self.readers[operand.value].add(group)
        self.readers[value].clear()
        return True

    def _chain(self, value: Value) -> tuple[list[Pointwise], set[Value]] | None:
        """The cheap operators, in order, that make a value from values in memory, and these values; else ``None``."""
        nodes: dict[Value, Pointwise] = {}
        sources: set[Value] = set()

        def visit(wanted: Value) -> bool:
            node = self.made[wanted]
            cheap = type(node) is Pointwise and node.op not in EXPENSIVE
            if not cheap or node in self.group_of[wanted].per_row or not same(wanted.numel, value.numel):
                return False
            for operand in node.operands:
                if not isinstance(operand, Operand) or operand.value in nodes:
                    continue
                if self._is_in_memory(operand.value, value):
                    sources.add(operand.value)
                elif not _is_aligned(operand) or not visit(operand.value):
                    return False
            nodes[wanted] = node
            return len(nodes) <= self.rules.limits.recompute.read_again

        return (list(nodes.values()), sources) if visit(value) else None

    def _is_in_memory(self, value: Value, wanted: Value) -> bool:
        """Whether ``value`` is in memory anyway, or is small compared with ``wanted`` and read by another group."""
        if value.source != "node" or value in self.kept:
            return True
        is_small = self.rules.limits.recompute.free_reads * sample_of(value.numel) <= sample_of(wanted.numel)
        return is_small and bool(self.readers[value])

    def _with_copies(self, group: Group, nodes: Sequence[Pointwise]) -> tuple[Group, dict[Value, Value]] | None:
        """The group with its own copy of ``nodes``, new value → copy; ``None`` if no kernel could compute it."""
        value, known = nodes[-1].out, self.copies[group]
        if not group.fusable or not same(group.elements, value.numel):
            return None
        new: dict[Value, Value] = {}
        before: list[Node] = []

        def placed(operand):
            if not isinstance(operand, Operand):
                return operand
            copy = new.get(operand.value, known.get(operand.value))
            return operand if copy is None else Operand(copy, operand.view)

        for node in nodes:
            if node.out not in known:
                new[node.out] = Value(node.out.name, node.out.shape, node.out.dtype)
                before.append(replace(node, operands=tuple(map(placed, node.operands)), out=new[node.out]))
        own = {copy: original for original, copy in known.items()}
        ahead = [node for node in group.nodes if node.out in own]
        behind: dict[Node, Node] = {}
        for node in group.nodes:
            if node.out in own or all(getattr(each, "value", None) is not value for each in node.operands):
                continue
            reads = [each for each in node.operands if getattr(each, "value", None) is value]
            if node in group.per_row or type(node) not in (Pointwise, Reduction) or not all(map(_is_aligned, reads)):
                return None
            operands = tuple(map(placed, node.operands))
            one = {"operand": operands[0]} if isinstance(node, Reduction) else {"operands": operands}
            behind[node] = replace(node, **one)
        rest = [behind.get(node, node) for node in group.nodes if node.out not in own]
        changed = replace(group, nodes=[*ahead, *before, *rest], sources=set(), users=set())
        changed.made = {out: node for node in changed.nodes for out in node.outs}
        changed.per_row = {behind.get(node, node) for node in group.per_row}
        return (changed, new) if self._is_possible(changed) else None

    def _is_possible(self, group: Group) -> bool:
        limits, free = self.rules.limits, {operand.value for _, operand in group.reads()}
        if len(group.nodes) > limits.kernel.nodes or len(free) > limits.kernel.buffers // 2:
            return False
        return space_of(group, self.rules) is not None


def _keep(group: Group, wanted: set[Value]) -> None:
    """Drops a group's nodes that no wanted value needs."""
    nodes = needed(group.nodes, wanted)
    if len(nodes) == len(group.nodes):
        return
    group.nodes = nodes
    group.made = {out: node for node in nodes for out in node.outs}
    group.per_row &= set(nodes)
    if len(group.per_row) == len(nodes):
        group.elements, group.columns, group.batch, group.per_row = nodes[0].out.numel, None, None, set()


def _is_aligned(operand: Operand) -> bool:
    """Whether all of a value is read, each element at its own place."""
    return same(operand.view.offset, 0) and operand.is_whole


def _bytes(value: Value) -> int:
    return 0 if value.source == "index" else sample_of(value.numel) * itemsize(value.dtype)
