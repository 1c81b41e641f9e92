"""Flow of a program's memory: instructions → of each tensor in memory of its own, when it is made, changed and read.

A view shares the memory of its *root*: the parameter, constant, intermediate or result that it is a view of. What is
said here about a root holds for all of its views.
"""

from __future__ import annotations

from autodiff.extents import sample_of
from bridge.compile.runtime.instructions import View, roots_of
from bridge.compile.runtime.layout import Register
from bridge.compile.runtime.program import Program

__all__ = ["Flow"]


class Flow:
    """When the instructions of a program work on which memory.

    Attributes:
        registers: of all roots but constants, by slot.
        views: what makes the tensors in the slots of views, by slot.
        constants: slots of constants.
        made: of each root that is no parameter and no constant, the first step that writes it; -1 for one without
            elements, which no step writes.
        born: of each slot but parameters', the step that fills it; -1 for what is there from the start.
        changed: of each root the last step that writes it.
        touched: of each root the last step that reads or writes it, through a view or not.
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
        views = (*layout.views, *(step for step in program.steps if isinstance(step, View)))
        self.views: dict[int, View] = {view.writes[0]: view for view in views}
        self._roots = roots_of(views)
        self.made: dict[int, int] = {}
        self.changed: dict[int, int] = {}
        self.touched: dict[int, int] = {}
        for index, step in enumerate(program.steps):
            for slot in (*step.reads, *step.writes):
                self.touched[self.root(slot)] = index
            for root in map(self.root, step.writes if not isinstance(step, View) else ()):
                self.changed[root] = index
                if root >= self.num_params and root not in self.constants:
                    self.made.setdefault(root, index)
        for slot in self.registers:
            if slot >= self.num_params:
                self.made.setdefault(slot, -1)
        self.born = dict.fromkeys((*self.constants, *self.views), -1) | self.made
        self.born |= {step.writes[0]: at for at, step in enumerate(program.steps) if isinstance(step, View)}

    def name(self, slot: int) -> str:
        """Of the tensor in a slot, for people."""
        if slot in self.views:
            return self.views[slot].outputs[0]
        return "a constant" if slot in self.constants else self.registers[slot].name

    def root(self, slot: int) -> int:
        """The slot of the tensor whose memory this is."""
        return self._roots.get(slot, slot)

    @property
    def boundaries(self) -> dict[int, int]:
        """Places where the steps can be cut in two → bytes of intermediates that cross there, of the sample's sizes.

        Place ``p`` is in front of step ``p``. None lies between two steps that write the same memory.
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
