"""Horizontal fusion: independent point-wise groups → one launch, each group in threads of its own.

For example, the casts of a layer's weights or the heads of an attention: the launch of a small kernel takes longer than
its work. A group moves to an earlier group's launch if its inputs are ready there. Library calls and reductions move
before small groups that they do not read: first the products of query, key and value, then the additions to each. No
bit changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from autodiff.extents import sample_of
from bridge.compile.loop_ir.graph import LibraryCall, Pointwise, Reduction, Value
from bridge.compile.schedule.fuse import Group
from bridge.compile.schedule.limits import Rules
from bridge.compile.schedule.plan_rows import Planned, plan_rows
from bridge.compile.schedule.row_plan import RowPlan

__all__ = ["HorizontalFusionPlan", "plan_horizontal_fusion", "together"]

_REACH = 32
"""Maximum number of steps that a group moves: its results occupy memory for as long."""
_SMALL = 2**20
"""Maximum elements of a group that lets others pass, or moves before others: its tensors occupy memory for longer."""


@dataclass(frozen=True)
class HorizontalFusionPlan:
    """Plans without reductions, of one index type, launched as one; tensors and integers are concatenated in order."""

    plans: tuple[RowPlan, ...]

    @property
    def index_type(self) -> str:
        """See :class:`~bridge.compile.schedule.row_plan.RowPlan`."""
        return self.plans[0].index_type

    @property
    def arguments(self) -> int:
        """The number of integers of a launch."""
        return sum(plan.arguments for plan in self.plans)


def together(groups: Sequence[Group], rules: Rules) -> list[list[Group]]:
    """Groups in execution order → launches in execution order, each a list of horizontally fused groups."""
    most = rules.limits.kernel.together
    if most == 1:
        return [[group] for group in groups]
    early = [group for step in _steps(groups, most, early=True) for group in step]
    return _steps(_others_first(early), most)


def _steps(groups: Sequence[Group], most: int, early: bool = False) -> list[list[Group]]:
    """``early``: moves small groups as early as possible, so that a library call that reads one need not wait."""
    steps: list[list[Group]] = []
    place: dict[Group, int] = {}
    for group in groups:
        own = len(steps)
        if _is_elementwise(group):
            ready = 1 + max((place[source] for source in group.sources if source in place), default=-1)
            others = range(max(ready, own - _REACH), own)
            if not (early and _is_small(group)):
                others = reversed(others)
            own = next((at for at in others if _takes(steps[at], most)), own)
        place[group] = own
        if own == len(steps):
            steps.append([])
        steps[own].append(group)
    return steps


def _others_first(groups: Sequence[Group]) -> list[Group]:
    """Moves each library call and small reduction before preceding small point-wise groups that it does not read.

    At most ``_REACH`` groups pass a group: another program may wait for its result, a gradient."""
    ordered: list[Group] = []
    passed: Counter[Group] = Counter()
    for group in groups:
        place = len(ordered)
        reduces = any(isinstance(node, Reduction) for node in group.nodes)
        if type(group.nodes[0]) is LibraryCall or (reduces and _is_small(group)):
            while place and passed[ordered[place - 1]] < _REACH and _lets_pass(ordered[place - 1], group):
                place -= 1
        passed.update(ordered[place:])
        ordered.insert(place, group)
    return ordered


def _lets_pass(group: Group, other: Group) -> bool:
    return group not in other.sources and _is_elementwise(group) and _is_small(group)


def _is_small(group: Group) -> bool:
    return sample_of(group.elements) <= _SMALL


def _takes(step: Sequence[Group], most: int) -> bool:
    return len(step) < most and _is_elementwise(step[0])


def _is_elementwise(group: Group) -> bool:
    """Whether the group is point-wise with 32-bit indices: a thread per vector computes it."""
    if not group.fusable or not all(isinstance(node, Pointwise) for node in group.nodes):
        return False
    values = {*group.made, *(operand.value for _, operand in group.reads())}
    return all(sample_of(value.numel) < 2**31 for value in values)


def plan_horizontal_fusion(
    groups: Sequence[Group], stored: Collection[Value], rules: Rules
) -> Planned[HorizontalFusionPlan]:
    """The plan of horizontally fused groups."""
    planned = [plan_rows(group, stored, rules) for group in groups]
    return Planned(
        HorizontalFusionPlan(tuple(each.plan for each in planned)),
        tuple(value for each in planned for value in each.inputs),
        tuple(value for each in planned for value in each.outputs),
        (),
        tuple(number for each in planned for number in each.scalars),
        tuple(op for each in planned for op in each.ops),
    )
