"""Branches of a recording: the steps of a program → which run side by side, and what each one waits for.

Recorded on one stream, launches are a chain: each waits for the one before, though the step behind a weight's gradient
has no use for it. Where a step does not fill the device, what is independent of it may run beside it.

Two steps keep their order if one writes memory that the other reads or writes. For this to be all that orders them,
intermediates must not take turns in the same memory: :func:`apart` gives each a place of its own, where there is room.
No step computes anything else than it did, so every result has the same bits.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from bridge.compile.runtime.arena import ALIGNMENT
from bridge.compile.runtime.flow import Flow
from bridge.compile.runtime.instructions import View
from bridge.compile.runtime.layout import Layout, Register
from bridge.compile.runtime.loop_step import Instruction
from bridge.compile.runtime.program import Program

__all__ = ["MOST_APART", "Place", "apart", "branches", "conflicts"]

#: Bytes of intermediates that get places of their own, at most. Where they take more, steps fill the device.
MOST_APART = 192 << 20

_LAUNCH = 2.5e-6
"""Seconds from one launch of a graph's to the next that waits for it, however little there is to do."""
_BYTES, _FLOPS = 3e12, 1e14
"""Per second, of a large GPU; what they are good for is to tell steps that fill it from steps that do not."""
_WORTH = 0.92
"""Of the chain's time: where the branches' is not below, the chain stays."""


@dataclass(frozen=True)
class Place:
    """Where a step is recorded.

    Attributes:
        branch: its number; 0 is the one that a recording begins and ends on.
        waits: steps of other branches that it has to wait for, where what its branch waited for before does not imply
            it.
    """

    branch: int
    waits: tuple[int, ...]


def apart(layout: Layout, most: int = MOST_APART) -> Layout | None:
    """The layout with each intermediate in memory of its own; ``None`` if that takes more than ``most`` bytes."""
    placed: list[Register] = []
    end = 0
    for register in layout.arena:
        placed.append(replace(register, offset=end))
        end += -(-register.nbytes // ALIGNMENT) * ALIGNMENT
    return None if end > most else replace(layout, arena=tuple(placed), arena_bytes=end)


def conflicts(program: Program) -> list[set[int]]:
    """Of each step, earlier ones that it has to come after; what these come after is not told again.

    Intermediates lie :func:`apart`. Inputs may lie in each other's memory: who writes one comes after all that read
    one.
    """
    flow = Flow(program)
    inputs_change = any(root < flow.num_params for root in flow.changed)

    def memory(slots: Sequence[int]) -> set[int]:
        roots = map(flow.root, slots)
        return {-1 if inputs_change and root < flow.num_params else root for root in roots}

    written: dict[int, int] = {}
    read: dict[int, list[int]] = {}
    found: list[set[int]] = []
    for index, step in enumerate(program.steps):
        before: set[int] = set()
        if not isinstance(step, View):  # nothing is launched for one
            changed = memory(step.writes)
            for root in memory(step.reads) | changed:
                if root in written:
                    before.add(written[root])
            for root in changed:
                before.update(read.pop(root, ()))
                written[root] = index
            for root in memory(step.reads) - changed:
                read.setdefault(root, []).append(index)
        found.append(before)
    return found


def branches(program: Program, most: int, joins: Collection[int] = ()) -> tuple[Place, ...] | None:
    """Where each step of a program of numbers is recorded; ``None`` where a chain is as good.

    List scheduling: in the program's order, each step goes to the branch on which it can begin first, by what steps
    take about.

    Args:
        most: branches.
        joins: steps at which all branches come together: all later ones come after all earlier ones.
    """
    before = conflicts(program)
    places: list[Place] = []
    ends: list[float] = []  # of each step
    free = [0.0] * most  # when each branch is
    known: list[list[int]] = [[-1] * most for _ in range(most)]  # the last step of each branch that each has waited for
    reached: list[list[int]] = []  # the same, behind each step
    last, chain, work, since = [-1] * most, 0.0, 0.0, 0
    for index, step in enumerate(program.steps):
        if index in joins:
            free = [max(free)] * most
            since = index + 1
        if index in joins or isinstance(step, View):
            places.append(Place(0, ()))
            ends.append(max(free))
            reached.append([])
            continue
        wanted = [earlier for earlier in before[index] if earlier >= since]
        ready = max((ends[earlier] for earlier in wanted), default=0.0)
        branch = min(range(most), key=lambda each: (max(ready, free[each]), last[each] not in wanted, each))
        waits = []
        for earlier in sorted(wanted, reverse=True):
            other = places[earlier].branch
            if other != branch and known[branch][other] < earlier:
                waits.append(earlier)
                known[branch] = [max(pair) for pair in zip(known[branch], reached[earlier], strict=True)]
        seconds = _work(step)
        chain, work = chain + _LAUNCH + seconds, work + seconds
        free[branch] = max(ready, free[branch]) + _LAUNCH + seconds
        known[branch][branch] = last[branch] = index
        places.append(Place(branch, tuple(waits)))
        ends.append(free[branch])
        reached.append(list(known[branch]))
    return tuple(places) if max(*free, work) < _WORTH * chain else None


def _work(step: Instruction) -> float:
    """Seconds that a step takes about, where it fills the device."""
    contents = step.contents
    return max(contents.bytes / _BYTES, contents.flops / _FLOPS)
