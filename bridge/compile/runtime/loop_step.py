"""Loop instruction: instructions that are run for each step of a sequence, as frozen data; and the union of all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from autodiff.extents import Dim
from bridge.compile.runtime.contents import Contents
from bridge.compile.runtime.instructions import CallLibrary, Launch, View
from bridge.compile.runtime.layout import Layout

__all__ = ["Instruction", "Loop", "inner_steps"]


@dataclass(frozen=True)
class Loop:
    """A body that is run ``length`` times (an extent is known when the program is bound), from the last step to the
    first with ``reverse``.

    ``reads``: the initial carries, tensors with the steps in front, of which each step reads its part, what every step
    reads, then ``constants`` that fill those slots of the body, then the parts of xs that lie ``apart`` (see
    :class:`~bridge.compile.loop_ir.graph.LoopCall`). ``writes``: the last carries, tensors with the steps in
    front, of which each step fills its part, and scratch memory: the body's arena and two places for each carry.

    The body's registers are its own: parameters are carries, ``xs`` parts and what every step reads; results are the
    next carries, then parts.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    steps: tuple[Instruction, ...] = field(repr=False)
    layout: Layout = field(repr=False)
    carries: int
    xs: int
    length: Dim
    reverse: bool = False
    constants: tuple[int, ...] = ()
    contents: Contents = field(default=Contents(), repr=False)
    apart: tuple[int, ...] = ()

    def __str__(self) -> str:
        order = ", last first" if self.reverse else ""
        head = f"{', '.join(self.outputs)} = {self.name} of {self.length} steps{order}({', '.join(self.inputs)})"
        return "\n".join([head, *(f"      {step}" for step in self.steps)])


Instruction = Launch | CallLibrary | View | Loop


def inner_steps(steps: Iterable[Instruction]) -> Iterator[Instruction]:
    """Instructions, each loop followed by those of its body."""
    for step in steps:
        yield step
        if isinstance(step, Loop):
            yield from inner_steps(step.steps)
