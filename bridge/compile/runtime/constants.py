"""Binding of constants: a program and tensors for its last parameters → the program of the other parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from bridge.compile.runtime.instructions import View
from bridge.compile.runtime.loop_step import Instruction
from bridge.compile.runtime.program import Program
from bridge.library import dense

__all__ = ["with_constants"]


def with_constants(program: Program, tensors: Sequence[torch.Tensor]) -> Program:
    """The program with ``tensors`` as constants in the place of its last parameters, of the same kernels.

    Views of them are made once. Nothing is copied but tensors that are not dense (or, on a GPU, aligned): who changes
    one changes what the program computes.

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
        if isinstance(step, View) and step.reads[0] in known:
            views.append(step)
            known.add(step.writes[0])
        else:
            steps.append(step)
    return replace(
        program,
        steps=tuple(steps),
        layout=replace(layout, params=layout.params[:first], views=tuple(views)),
        constants=(*program.constants, *constants),
    )
