"""Allocation of large intermediates: a program → the same program, whose large intermediates are not in the arena.

Each takes memory of torch's allocator from its first writing step to its last use. The allocator then gives it memory
that the run has released (inputs that the caller hands over, other intermediates), and between runs to any program; an
arena would hold it for good. The arena's plan, made anew, holds the small ones, whose allocations would cost the host
more than they save.
"""

from __future__ import annotations

from dataclasses import replace

from bridge.compile.runtime.cut import Liveness
from bridge.compile.runtime.instructions import Allocate, Launch, MakeView
from bridge.compile.runtime.layout import ArenaSlot, plan_arena
from bridge.compile.runtime.loop_frame import Instruction, RunLoop
from bridge.compile.runtime.program import Program

__all__ = ["with_allocations"]


def with_allocations(program: Program, least: int) -> Program:
    """The program with its intermediates of at least ``least`` bytes in memory of their own; the same kernels, and the
    same bits. The memory of a loop's steps stays in the arena.

    Args:
        program: without symbolic extents.
    """
    layout = program.layout
    scratch = {step.writes[-1] for step in program.steps if isinstance(step, RunLoop)}  # a loop keeps tensors in it
    large = {each.slot: each for each in layout.arena if each.nbytes >= least and each.slot not in scratch}
    if not large:
        return program
    flow = Liveness(program)
    views: dict[int, list[MakeView]] = {}
    for view in layout.views:
        views.setdefault(flow.root(view.reads[0]), []).append(view)
    steps: list[Instruction] = []
    made: set[int] = set()
    for step in program.steps:
        for slot in dict.fromkeys(map(flow.root, step.writes)):
            if slot in large and slot not in made:
                each = large[slot]
                steps.append(Allocate("allocate", (each.name,), (slot,), each.shape, each.torch_dtype))
                steps += views.get(slot, ())
                made.add(slot)
        steps.append(step)
    throughout = {slot for step in program.steps if isinstance(step, Launch) and step.once for slot in step.writes}
    small = [each for each in layout.arena if each.slot not in made]
    placed = {ArenaSlot(each.slot, each.nbytes): _lifetime(flow, each.slot, throughout) for each in small}
    arena = plan_arena(placed)
    offsets = {value.slot: offset for value, offset in arena.offsets.items()}
    found = replace(
        program,
        steps=tuple(steps),
        layout=replace(
            layout,
            arena=tuple(replace(each, offset=offsets[each.slot]) for each in small),
            arena_bytes=arena.size,
            views=tuple(view for view in layout.views if flow.root(view.reads[0]) not in made),
        ),
    )
    found.share(replace(program.shared, last_uses=()))
    return found


def _lifetime(flow: Liveness, slot: int, throughout: set[int]) -> tuple[int, int]:
    first = max(flow.made[slot], 0)
    return (0, flow.num_steps) if slot in throughout else (first, flow.touched.get(slot, first))
