"""Passes over a row: a group's reductions and stores → the pass that each is done in, and what is cached in between."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from autodiff.extents import Dim, Extent, same
from bridge.compile.codegen.pointwise import EXPENSIVE
from bridge.compile.loop_ir.graph import Node, Operand, Reduction, Value
from bridge.compile.schedule.fuse import Group

__all__ = ["Contents", "Recomputed", "levels_of", "plan_passes"]


@dataclass(frozen=True)
class Contents:
    """One pass as nodes and values of the group; see :class:`bridge.compile.schedule.row_plan.RowPass`."""

    reductions: tuple[Reduction, ...]
    stores: tuple[Value, ...]
    cached: tuple[Value, ...]

    @property
    def roots(self) -> list[Value]:
        """What the pass has to compute."""
        return [node.operand.value for node in self.reductions] + [*self.stores, *self.cached]


def levels_of(nodes: Iterable[Node]) -> dict[Value, int]:
    """Of each result, how many reductions of the row it waits for, one after another."""
    levels: dict[Value, int] = {}
    for node in nodes:
        level = max((levels.get(op.value, 0) for op in node.operands if isinstance(op, Operand)), default=0)
        levels[node.out] = level + (isinstance(node, Reduction) and same(node.inner, 1))
    return levels


@dataclass(frozen=True)
class Recomputed:
    """Which values a later pass recomputes instead of finding them cached.

    Attributes:
        cheap: those of so few operations.
        cheap_shared: those of so few operations on nothing but tensors of at most ``columns`` elements, which all rows
            share, such as casts of a LayerNorm's weights: they are read from the nearest cache, whereas kept ones would
            take registers away from threads that wait for memory.
        columns: elements of a row.
    """

    cheap: int
    cheap_shared: int
    columns: Dim


def plan_passes(
    group: Group, stored: Collection[Value], levels: Mapping[Value, int], recomputed: Recomputed
) -> list[Contents]:
    """The passes of a group whose members ``stored`` are written to memory."""
    return _Passes(group, stored, levels, recomputed).plan()


class _Passes:
    def __init__(
        self, group: Group, stored: Collection[Value], levels: Mapping[Value, int], recomputed: Recomputed
    ) -> None:
        self.recomputed = recomputed
        self.group = group
        self.stored = stored
        self.levels = levels

    def plan(self) -> list[Contents]:
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
            roots = Contents(tuple(reductions[index]), tuple(stores[index]), tuple(caches[index])).roots
            for value in self._wanted(roots, index):
                if value not in cached and not self._cheap(value, cached):
                    cached.add(value)
                    caches[self.levels[value]].append(value)
        return list(map(Contents, map(tuple, reductions), map(tuple, stores), map(tuple, caches)))

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
