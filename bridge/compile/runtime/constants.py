"""Binding of constants: a program and tensors for its last parameters → the program of the other parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from bridge.base.mkl import can_pack, packed
from bridge.compile.runtime.bind import bind
from bridge.compile.runtime.instructions import CallLibrary, Launch, MakeView
from bridge.compile.runtime.loop_frame import Instruction
from bridge.compile.runtime.program import Program
from bridge.compile.schedule.products import PACKED
from bridge.library import dense

__all__ = ["with_constants"]


def with_constants(program: Program, tensors: Sequence[torch.Tensor]) -> Program:
    """The program with ``tensors`` as constants in the place of its last parameters, of the same kernels.

    Views of them are made once. Nothing is copied but tensors that are not dense (or, on a GPU, aligned): who changes
    one changes what the program computes.

    A factor that only products of the way "packed" read is laid out for them, in memory of its own, and one that
    generated products read in panels is packed for them; where nothing else reads it, it is no constant then.

    Raises:
        ValueError: a tensor has another shape or element type than its parameter.
    """
    layout = program.layout
    first = len(layout.params) - len(tensors)
    constants = []
    for register, tensor in zip(layout.params[first:], tensors, strict=True):
        if tuple(tensor.shape) != register.shape or tensor.dtype != register.torch_dtype:
            wanted = f"{register.torch_dtype} {register.shape}"
            raise ValueError(f"{register.name}: wanted {wanted}, got {tensor.dtype} {tuple(tensor.shape)}")
        constants.append((register.slot, dense(tensor.detach())))
    known = {slot for slot, _ in (*program.constants, *constants)} | {view.writes[0] for view in layout.views}
    steps: list[Instruction] = []
    views = list(layout.views)
    for step in program.steps:
        if isinstance(step, MakeView) and step.reads[0] in known:
            views.append(step)
            known.add(step.writes[0])
        else:
            steps.append(step)
    found = dict((*program.constants, *constants))
    steps = _in_panels(program, steps, views, found)
    laid_out = _packed_factors(steps, found, views)
    return replace(
        program,
        steps=tuple(steps),
        layout=replace(
            layout,
            params=layout.params[:first],
            views=tuple(view for view in views if view.writes[0] not in laid_out),
            laid_out=(),
        ),
        constants=(*(each for each in found.items() if each[0] not in laid_out), *laid_out.items()),
    )


def _in_panels(
    program: Program, steps: Sequence[Instruction], views: Sequence[MakeView], constants: dict[int, torch.Tensor]
) -> list[Instruction]:
    """The instructions but for those that pack constants, which run now: panels become constants, in the place of what
    only these read."""
    wanted = {register.slot: register for register in program.layout.laid_out}
    packs = [step for step in steps if isinstance(step, Launch) and step.writes[0] in wanted]
    if not packs:
        return list(steps)
    program.backend.threads()  # a new thread's OpenMP setting becomes torch's when torch is first asked in it
    functions, sources = {step.name: program.code[step.name].function for step in packs}, set()
    for step in packs:
        register = wanted[step.writes[0]]
        constants[register.slot] = torch.zeros(register.shape, dtype=register.torch_dtype)
        bind(step, functions, {})(constants)
        sources.update(step.reads)
    left = [step for step in steps if step not in packs]
    read = {slot for step in (*left, *views) for slot in step.reads} | {*program.layout.memory}
    for slot in sources - read:
        del constants[slot]
    return left


def _packed_factors(
    steps: Sequence[Instruction], constants: Mapping[int, torch.Tensor], views: Sequence[MakeView]
) -> dict[int, torch.Tensor]:
    """By slot, what takes the place of constants, and of views of them, that products read packed."""
    if not can_pack():
        return {}
    view_of = {view.writes[0]: view for view in views}
    others = {slot for step in steps for slot in _others(step)} | {view.reads[0] for view in views}
    found: dict[int, torch.Tensor] = {}
    for step in steps:
        if not (isinstance(step, CallLibrary) and step.name == PACKED) or step.reads[1] in others:
            continue
        slot, view = step.reads[1], view_of.get(step.reads[1])
        if slot in found:
            continue
        base = constants.get(slot if view is None else view.reads[0])
        if base is not None:
            factor = base if view is None else base.as_strided(view.shape, view.strides, view.offset)
            found[slot] = packed(factor, step.attrs[0])
    return found


def _others(step: Instruction) -> Sequence[int]:
    """Slots that an instruction reads in any other way than a packed factor."""
    return step.reads[:1] if isinstance(step, CallLibrary) and step.name == PACKED else step.reads
