"""Loops at run time: a loop instruction and its body's actions → a function of the registers.

A part of a tensor with the steps in front is a view, and a kernel of the body writes a result straight into the part
that it is. A carry that is such a part is read from there in the next step; another one is written by turns into two
places, so that no step writes what it reads.

Kernels on a GPU read vectors of 16 bytes. Where parts do not all begin at a multiple of that, they are those of a copy
with gaps between them: one copy for all steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import cycle

import torch

from bridge.base.devices import HOST
from bridge.compile.loop_ir.views import dense_strides
from bridge.compile.runtime.arena import ALIGNMENT
from bridge.compile.runtime.instructions import View
from bridge.compile.runtime.layout import Layout, Register
from bridge.compile.runtime.loop_step import Loop
from bridge.library import ALIGNMENT as ACCESS

__all__ = ["loop_action", "scratch_bytes"]

Action = Callable[[list], None]


def scratch_bytes(layout: Layout, carries: int) -> int:
    """Memory that a loop needs beside what it reads and writes."""
    return _aligned(layout.arena_bytes) + 2 * sum(_aligned(each.nbytes) for each in layout.params[:carries])


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


def loop_action(loop: Loop, actions: Sequence[Action], views: Sequence[Action]) -> Action:
    """What runs a loop; ``actions`` are those of its steps, ``views`` make the views that stay the same."""
    return _LoopAction(loop, actions, views)


class _LoopAction:
    """Pairs are of a slot of the body, and whose it is, by number; what is put in there at each step is looked up once.

    Where a result is a view of all of a tensor that a kernel writes, in its order, that tensor is the y's part.
    """

    def __init__(self, loop: Loop, actions: Sequence[Action], views: Sequence[Action]):
        self._loop, layout, carries = loop, loop.layout, loop.carries
        slots = [param.slot for param in layout.params]
        self._carried = slots[:carries]
        read = {slot for step in loop.steps for slot in step.reads} | {view.reads[0] for view in layout.views}
        read.update(layout.results)
        self._parts = [(x, slot) for x, slot in enumerate(slots[carries : carries + loop.xs]) if slot in read]
        self._fixed = [*slots[carries + loop.xs :], *loop.constants]
        lasting = set(slots[carries:])
        fresh = {register.slot: register for register in layout.fresh}
        memory = {slot: _memory_of(slot, loop) for slot in layout.results}
        home: dict[int, int] = {}  # the y that a kernel's result is written into
        for y, slot in enumerate(layout.results[carries:]):
            if memory[slot] in fresh:
                home.setdefault(memory[slot], y)
        self._written = [(y, fresh[slot]) for slot, y in home.items()]
        self._copied = [(y, slot) for y, slot in enumerate(layout.results[carries:]) if home.get(memory[slot]) != y]
        self._turns: list[tuple[int, int]] = []  # carries that are written into their places
        self._kept: list[tuple[int, int]] = []  # those that lie somewhere where they stay
        self._moved: list[tuple[int, int]] = []  # those that have to be copied into their places
        taken = set(home)
        for carry, slot in enumerate(layout.results[:carries]):
            if memory[slot] in home or slot in lasting:
                self._kept.append((carry, slot))
            elif slot in fresh and slot not in taken:
                self._turns.append((carry, slot))
                taken.add(slot)
            else:
                self._moved.append((carry, slot))
        self._unplaced = [
            register for register in layout.fresh if register.slot not in taken
        ]  # of which results are views
        self._first, self._actions = self._in_order(actions, views)

    def _in_order(
        self, actions: Sequence[Action], views: Sequence[Action]
    ) -> tuple[tuple[Action, ...], tuple[Action, ...]]:
        """What is done before the first step, and at each; views that nobody looks at are not made."""
        steps = self._loop.steps
        looked_at = {slot for step in steps for slot in step.reads}
        looked_at.update(slot for _, slot in (*self._copied, *self._kept, *self._turns, *self._moved))
        fixed, first, each = set(self._fixed), list(views), []
        for step, action in zip(steps, actions, strict=True):
            if isinstance(step, View) and step.writes[0] not in looked_at:
                continue
            if isinstance(step, View) and step.reads[0] in fixed:
                fixed.add(step.writes[0])
                first.append(action)
            else:
                each.append(action)
        return tuple(first), tuple(each)

    def __call__(self, registers: list) -> None:
        loop, layout, actions = self._loop, self._loop.layout, self._actions
        *outs, scratch = [registers[slot] for slot in loop.writes]
        given = [registers[slot] for slot in loop.reads]
        carries, xs = loop.carries, loop.xs
        body: list = [None] * layout.size
        layout.fill(body, scratch)
        for slot, tensor in zip(self._fixed, given[carries + xs :], strict=True):
            body[slot] = tensor
        for make_view in self._first:
            make_view(body)
        for slot, tensor in zip(self._carried, given, strict=False):
            body[slot] = tensor
        for register in self._unplaced:
            body[register.slot] = torch.empty(register.shape, dtype=register.torch_dtype, device=scratch.device)
        places = self._places(scratch)
        stacks = [_apart(out) for out in outs[carries:]]
        taken = {slot: self._steps_of(_filled_apart(given[carries + x])) for x, slot in self._parts}
        taken |= {each.slot: self._steps_of(_shaped(stacks[y], each.shape)) for y, each in self._written}
        taken |= {slot: cycle(places[carry]) for carry, slot in self._turns}
        copied = [(slot, iter(self._steps_of(stacks[y]))) for y, slot in self._copied]
        moved = [(carry, slot, cycle(places[carry])) for carry, slot in self._moved]
        lying = [(self._carried[carry], slot) for carry, slot in (*self._turns, *self._kept)]
        slots = tuple(taken)
        for _, *row in zip(range(loop.length), *taken.values(), strict=False):
            for slot, tensor in zip(slots, row, strict=True):
                body[slot] = tensor
            for act in actions:
                act(body)
            for slot, targets in copied:
                next(targets).copy_(body[slot])
            following = [(carried, body[slot]) for carried, slot in lying]
            for carry, slot, targets in moved:
                following.append((self._carried[carry], next(targets).copy_(body[slot])))
            for carried, tensor in following:
                body[carried] = tensor
        for out, slot in zip(outs, self._carried, strict=False):
            out.copy_(body[slot])
        for out, stack in zip(outs[carries:], stacks, strict=True):
            if stack is not out:
                out.copy_(stack)

    def _steps_of(self, whole: torch.Tensor) -> Sequence[torch.Tensor]:
        """The parts of a tensor with the steps in front, in the order of the steps."""
        parts = whole.unbind(0)
        return parts[::-1] if self._loop.reverse else parts

    def _places(self, scratch: torch.Tensor) -> list[list[torch.Tensor]]:
        """Two tensors for each carry, behind the body's arena."""
        begin = _aligned(self._loop.layout.arena_bytes)
        places = []
        for register in self._loop.layout.params[: self._loop.carries]:
            pair = []
            for _ in range(2):
                pair.append(_tensor(register, scratch, begin))
                begin += _aligned(register.nbytes)
            places.append(pair)
        return places


def _apart(whole: torch.Tensor) -> torch.Tensor:
    """Memory like a tensor with the steps in front, whose parts are dense and begin where a kernel can read vectors;
    the tensor itself where its own do."""
    part = whole[0]
    if whole.device == HOST or not part.nbytes % ACCESS:
        return whole
    elements = ACCESS // part.element_size()
    gapped = whole.new_empty(len(whole), -(-part.numel() // elements) * elements)
    return gapped[:, : part.numel()].view(whole.shape)


def _filled_apart(whole: torch.Tensor) -> torch.Tensor:
    """That, with the tensor's values."""
    apart = _apart(whole)
    return whole if apart is whole else apart.copy_(whole)


def _shaped(whole: torch.Tensor, part: Sequence[int]) -> torch.Tensor:
    """The parts of a tensor with the steps in front, which are dense, in another shape."""
    if tuple(whole.shape[1:]) == tuple(part):
        return whole
    return whole.as_strided((len(whole), *part), (whole.stride(0), *dense_strides(part)))


def _memory_of(slot: int, loop: Loop) -> int:
    """The slot of the tensor of which this is a view of all elements, in their order; itself if there is none."""
    views = {step.writes[0]: step for step in loop.steps if isinstance(step, View)}
    fresh = {register.slot: register for register in loop.layout.fresh}
    view = views.get(slot)
    if view is None or view.reads[0] not in fresh or view.offset:
        return slot
    of = fresh[view.reads[0]]
    is_all = view.strides == dense_strides(view.shape) and math.prod(view.shape) == of.numel
    return of.slot if is_all else slot


def _tensor(register: Register, memory: torch.Tensor, begin: int) -> torch.Tensor:
    if not register.numel:
        return torch.empty(register.shape, dtype=register.torch_dtype, device=memory.device)
    return memory[begin : begin + register.nbytes].view(register.torch_dtype).view(register.shape)
