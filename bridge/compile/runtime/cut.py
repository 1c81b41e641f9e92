"""Cutting: a program and places between its steps → segments, each with the tensors it takes from earlier ones.

Liveness: instructions → for each tensor with memory of its own, the steps that make, change and read it. A view shares
the memory of its *root* (a parameter, constant, intermediate or result), and statements about a root hold for it.

Views of results: steps at a program's end → right after the steps that compute their base. A consumer of one result, as
of one gradient of many, then waits only for that.

Segments are programs that, one after another, do the same as the whole. The steps are the same, in the same order, on
tensors of the same geometry, so every result has the same bits. A segment has its own arena; its results include
values that later segments read; views are made again in each segment. No memory is written on both sides of a cut.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from autodiff.extents import sample_of
from bridge.compile.runtime.build import some_of
from bridge.compile.runtime.instructions import MakeView
from bridge.compile.runtime.layout import ArenaSlot, Register, RegisterLayout, lying_below, plan_arena
from bridge.compile.runtime.loop_frame import Instruction, inner_steps
from bridge.compile.runtime.program import Program

__all__ = ["Liveness", "Segment", "brought_forward", "cut"]


class Liveness:
    """Which steps of a program use which memory.

    Attributes:
        registers: all roots except constants, by slot.
        views: the view instructions, by slot.
        constants: slots of constants.
        made: root that is no parameter and no constant → its first writing step; -1 for an empty tensor.
        born: slot that is no parameter → the step that fills it; -1 for a slot that is filled from the start.
        changed: root → its last writing step.
        touched: root → the last step that reads or writes it, also through a view.
        handed_out: roots of results.
    """

    def __init__(self, program: Program):
        layout = program.layout
        self.num_params = len(layout.params)
        self.num_steps = len(program.steps)
        self.handed_out = set(layout.memory)
        made = (*layout.params, *layout.arena, *layout.fresh, *layout.allocated)
        self.registers: dict[int, Register] = {register.slot: register for register in made}
        self.constants = {slot for slot, _ in (*program.constants, *program.positions)}
        views = (*layout.views, *(step for step in program.steps if isinstance(step, MakeView)))
        self.views: dict[int, MakeView] = {view.writes[0]: view for view in views}
        self._roots: dict[int, int] = {}  # slot of a view → slot of the tensor that owns its memory
        for view in views:  # after its base
            self._roots[view.writes[0]] = self._roots.get(view.reads[0], view.reads[0])
        self.made: dict[int, int] = {}
        self.changed: dict[int, int] = {}
        self.touched: dict[int, int] = {}
        for index, step in enumerate(program.steps):
            for slot in (*step.reads, *step.writes):
                self.touched[self.root(slot)] = index
            for root in map(self.root, step.writes if not isinstance(step, MakeView) else ()):
                self.changed[root] = index
                if root >= self.num_params and root not in self.constants:
                    self.made.setdefault(root, index)
        for slot in self.registers:
            if slot >= self.num_params:
                self.made.setdefault(slot, -1)
        self.born = dict.fromkeys((*self.constants, *self.views), -1) | self.made
        self.born |= {step.writes[0]: at for at, step in enumerate(program.steps) if isinstance(step, MakeView)}

    def name(self, slot: int) -> str:
        """A tensor's name, for messages."""
        if slot in self.views:
            return self.views[slot].outputs[0]
        return "a constant" if slot in self.constants else self.registers[slot].name

    def root(self, slot: int) -> int:
        """The slot of the tensor that owns this slot's memory."""
        return self._roots.get(slot, slot)

    @property
    def boundaries(self) -> dict[int, int]:
        """Valid cuts: place between steps → bytes of intermediates live across it, at the sample's sizes.

        Place ``p`` is before step ``p``. No place is between two steps that write the same memory.
        """
        inside = [0] * (self.num_steps + 1)
        crossing = [0] * (self.num_steps + 1)
        for slot, first in self.made.items():
            inside[first + 1] += 1
            inside[self.changed.get(slot, first) + 1] -= 1
        for slot, first in self.made.items():
            last = self.touched.get(slot, first)
            if slot in self.handed_out or last == first:
                continue
            crossing[first + 1] += sample_of(self.registers[slot].nbytes)
            crossing[last + 1] -= sample_of(self.registers[slot].nbytes)
        found: dict[int, int] = {}
        partial = total = 0
        for place in range(1, self.num_steps):
            partial, total = partial + inside[place], total + crossing[place]
            if not partial:
                found[place] = total
        return found


def brought_forward(steps: Sequence[Instruction], first: int) -> tuple[list[Instruction], dict[int, int]]:
    """Moves views right after the step that makes their base; from ``first`` on, all steps are views.

    Returns the steps, and old place → new place of the steps up to ``first``."""
    written = {slot: index for index, step in enumerate(steps[:first]) for slot in step.writes}
    behind: dict[int, list[Instruction]] = {}
    for view in steps[first:]:
        behind.setdefault(written.get(view.reads[0], -1), []).append(view)
    found, places = [*behind.get(-1, ())], {}
    for index, step in enumerate(steps[:first]):
        places[index] = len(found)
        found += [step, *behind.get(index, ())]
    places[first] = len(found)
    return found, places


@dataclass(frozen=True)
class Segment:
    """One part of a program. Slots are the whole program's.

    Attributes:
        program: takes the tensors in ``takes``, returns the ones in ``gives``, in order; ``None``: nothing to do.
        takes: ``(slot, whether this is the tensor's last use)``.
        gives: slots.
        results: ``(place, slot)`` of the whole program's results that are complete and that no later segment touches.
    """

    program: Program | None = field(repr=False)
    takes: tuple[tuple[int, bool], ...]
    gives: tuple[int, ...]
    results: tuple[tuple[int, int], ...]


def cut(program: Program, places: Sequence[int], name: str) -> tuple[Segment, ...]:
    """The segments of a program, one more than ``places``.

    Args:
        places: ascending, each of :attr:`Liveness.boundaries`, the beginning or the end; repeats give empty segments.
        name: of the segments' programs.

    Raises:
        ValueError: an invalid place, or places out of order.
    """
    flow, layout = Liveness(program), program.layout
    if list(places) != sorted(places) or not {0, flow.num_steps, *flow.boundaries}.issuperset(places):
        raise ValueError(f"{program.name}: cannot be cut at {list(places)} of {flow.num_steps} steps")
    ends = (0, *places, flow.num_steps)
    results: list[list[tuple[int, int]]] = [[] for _ in ends[1:]]
    for place, (slot, root) in enumerate(zip(layout.results, layout.memory, strict=True)):
        last = flow.born[slot] if root in flow.constants else flow.touched.get(root, -1)
        results[bisect_right(places, last)].append((place, slot))
    segments: list[Segment] = []
    wanted: set[int] = set()  # by later segments, or by the caller
    for index in reversed(range(len(places) + 1)):
        steps = program.steps[ends[index] : ends[index + 1]]
        wanted |= {slot for _, slot in results[index]}
        own = {slot for slot, step in flow.born.items() if bisect_right(places, step) == index}
        gives = tuple(sorted(wanted & own))
        roots = dict.fromkeys(flow.root(slot) for slot in (*_touched(steps), *gives))
        takes = tuple(root for root in roots if root not in own and root not in flow.constants)
        made = _Part(program, flow, steps, takes, gives).program(name) if steps or gives else None
        told = tuple((slot, slot not in wanted) for slot in takes)
        segments.append(Segment(made, told, gives, tuple(results[index])))
        wanted |= set(takes)
    return tuple(reversed(segments))


def _touched(steps: Sequence[Instruction]) -> list[int]:
    return [slot for step in steps for slot in (*step.reads, *step.writes)]


class _Part:
    """Makes a program of some steps of a program, with its own slots."""

    def __init__(
        self, whole: Program, flow: Liveness, steps: Sequence[Instruction], takes: Sequence[int], gives: Sequence[int]
    ) -> None:
        self._whole, self._flow, self._takes, self._gives = whole, flow, takes, gives
        self._slots = {slot: index for index, slot in enumerate(takes)}
        self._allocated = {register.slot for register in whole.layout.allocated}
        self._given = {*gives, *map(flow.root, gives)}
        outside = {*takes, *self._given, *self._allocated}
        self._static_views: list[MakeView] = []
        self._steps: list[Instruction] = []
        known: set[int] = set()
        for step in steps:
            made = step.writes[0] if isinstance(step, MakeView) else None
            for slot in (*step.reads, *step.writes):
                if slot in flow.views and slot not in known and slot != made:
                    static = flow.root(slot) not in outside
                    (self._static_views if static else self._steps).append(flow.views[slot])
                known.add(slot)
            self._steps.append(step)

    def program(self, name: str) -> Program:
        whole, flow = self._whole, self._flow
        touched: dict[int, tuple[int, int]] = {}
        for index, step in enumerate(self._steps):
            for root in (flow.root(slot) for slot in (*step.reads, *step.writes)):
                touched[root] = touched.get(root, (index, index))[0], index
        for view in self._static_views:
            touched.setdefault(flow.root(view.writes[0]), (0, 0))
        elsewhere = {*self._takes, *self._given, *self._allocated}
        placed = [slot for slot in touched if slot in flow.made and slot not in elsewhere]
        arena = plan_arena({ArenaSlot(slot, flow.registers[slot].nbytes): touched[slot] for slot in placed})
        offsets = {value.slot: offset for value, offset in arena.offsets.items()}
        below: tuple[tuple[int, ...], ...] = ()
        if whole.scope is not None:
            placed.sort(key=offsets.__getitem__)
            below = lying_below([touched[slot] for slot in placed])
        fresh = sorted(self._given & flow.made.keys() - self._allocated - {*self._takes})
        held = {*touched, *self._given}
        steps = tuple(map(self._renumbered, self._steps))
        views = tuple(map(self._renumbered, self._static_views))
        constants = tuple((self._slot(slot), each) for slot, each in whole.constants if slot in held)
        positions = tuple((self._slot(slot), each) for slot, each in whole.positions if slot in held)
        layout = RegisterLayout(
            size=0,
            params=tuple(map(self._register, self._takes)),
            arena=tuple(replace(self._register(slot), offset=offsets[slot]) for slot in placed),
            arena_bytes=arena.size,
            fresh=tuple(map(self._register, fresh)),
            views=views,
            results=tuple(map(self._slot, self._gives)),
            memory=tuple(self._slot(flow.root(slot)) for slot in self._gives),
            below=below,
        )
        launched = {step.name for step in inner_steps(steps)}
        return replace(
            whole,
            name=name,
            steps=steps,
            layout=replace(layout, size=len(self._slots)),
            constants=constants,
            positions=positions,
            kernels=some_of(whole.kernels, launched),
            code=some_of(whole.code, launched),
            results=tuple(flow.name(slot) for slot in self._gives),
            variables=(),
            stage_seconds={},
        )

    def _slot(self, slot: int) -> int:
        return self._slots.setdefault(slot, len(self._slots))

    def _renumbered(self, step: Instruction) -> Instruction:
        return replace(step, reads=tuple(map(self._slot, step.reads)), writes=tuple(map(self._slot, step.writes)))

    def _register(self, slot: int) -> Register:
        return replace(self._flow.registers[slot], slot=self._slot(slot), offset=0)
