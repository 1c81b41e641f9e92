"""Loops at run time: a loop instruction and its body's actions → a function of the registers.

One step's part of a stacked tensor (steps first) is a view, and a kernel of the body writes a result straight into its
part. The next step reads a carry there if the carry is also stacked; any other carry alternates between two places, so
that no step overwrites its own input, and the last step writes into the loop's result.

If the backend has a driver and the body is kernels alone, the driver runs the steps with addresses in place of tensors,
see :mod:`bridge.compile.runtime.loop_frame`. Tensors in a loop's scratch memory are made once per memory: making one
takes 4 us when Python's caches are cold, as they are between a call's first products and its steps.

Kernels on a GPU read vectors of 16 bytes. If the parts of a stack are not aligned to that, the loop uses one copy of
the stack with padding between the parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from autodiff.lazy import cached_property
from bridge.base.devices import HOST
from bridge.base.torch_internals import VF
from bridge.compile.loop_ir.views import dense_strides
from bridge.compile.runtime.instructions import Launch, MakeView
from bridge.compile.runtime.layout import ALIGNMENT, Register, RegisterLayout
from bridge.compile.runtime.loop_frame import Addresses, Instruction, LoopFrames, RunLoop
from bridge.library import ALIGNMENT as ACCESS

__all__ = ["loop_action", "scratch_bytes"]

Action = Callable[[list], None]

_FEWEST_DRIVEN = 4
"""The least number of steps for which a frame pays."""


def scratch_bytes(layout: RegisterLayout, carries: int) -> int:
    """Bytes of scratch memory of a loop: its body's arena, and a second place for each carry."""
    return _aligned(layout.arena_bytes) + sum(_aligned(each.nbytes) for each in layout.params[:carries])


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


def loop_action(
    loop: RunLoop, actions: Sequence[Action], views: Sequence[Action], frames: LoopFrames | None = None
) -> Action:
    """The action of a loop; ``actions``: of its steps, ``views``: of the views that stay the same, ``frames``: the
    driver's frames if the body is launches alone."""
    return _LoopAction(loop, actions, views, frames)


@dataclass(frozen=True)
class _Carries:
    """The passing of a loop's carries to the next step, as (number of the carry, slot of its next value).

    Attributes:
        slots: of the carries in a step.
        turns: carries that alternate between two places.
        kept: carries whose next value stays in its memory.
        moved: carries that are copied into their places.
    """

    slots: Sequence[int]
    turns: list[tuple[int, int]] = field(default_factory=list)
    kept: list[tuple[int, int]] = field(default_factory=list)
    moved: list[tuple[int, int]] = field(default_factory=list)

    @property
    def all(self) -> list[tuple[int, int]]:
        return [*self.kept, *self.turns, *self.moved]

    @cached_property
    def following(self) -> dict[int, int]:
        """Slot of each carry that is not moved → slot of its next value."""
        return {self.slots[carry]: slot for carry, slot in (*self.turns, *self.kept)}


class _Views(NamedTuple):
    """The views that each step makes.

    Attributes:
        each: the instructions, with their actions.
        bases: slot of a view → slot of its base, and the view's offset in bytes.
        last: actions of views that are carries' next values; ``ending``: slots of these views and of their bases.
    """

    each: list[tuple[MakeView, Action]]
    bases: dict[int, tuple[int, int]]
    last: list[Action]
    ending: set[int]

    @staticmethod
    def of(each: list[tuple[MakeView, Action]], types: Mapping[int, torch.dtype], following: set[int]) -> _Views:
        """Views of slots of these types; ``following``: slots of carries' next values. Results of library calls have no
        type here, nor an address before the step."""
        types, bases = {**types}, {}
        for view, _ in each:  # a view of a view comes after its base
            (base,), (slot,) = view.reads, view.writes
            if base in types:
                types[slot], bases[slot] = types[base], (base, view.offset and view.offset * types[base].itemsize)
        last = [action for view, action in each if view.writes[0] in following]
        ending = following | {view.reads[0] for view, _ in each if view.writes[0] in following}
        return _Views(each, bases, last, ending)


class _LoopAction:
    """Runs a loop. Pairs are (number of a carry, x or y; slot of the body); each step's changes are looked up once.

    If a y is a contiguous view of a whole tensor that a kernel writes, that tensor is the y's part.
    """

    def __init__(
        self, loop: RunLoop, actions: Sequence[Action], views: Sequence[Action], frames: LoopFrames | None = None
    ):
        self._loop, layout, carries = loop, loop.layout, loop.carries
        slots = [param.slot for param in layout.params]
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
        self._carries = _Carries(slots[:carries])
        taken = set(home)
        for carry, slot in enumerate(layout.results[:carries]):
            if memory[slot] in home or slot in lasting:
                self._carries.kept.append((carry, slot))
            elif slot in fresh and slot not in taken:
                self._carries.turns.append((carry, slot))
                taken.add(slot)
            else:
                self._carries.moved.append((carry, slot))
        self._unplaced = [register for register in layout.fresh if register.slot not in taken]  # with results as views
        self._first, self._actions, each = self._in_order(actions, views)
        types = {each.slot: each.torch_dtype for each in (*layout.params, *layout.arena, *layout.fresh)}
        views_of_steps = [(step, action) for step, action in each if isinstance(step, MakeView)]
        self._views = _Views.of(views_of_steps, types, {*self._carries.following.values()})
        self._lying: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._frames = None if self._copied or self._carries.moved or loop.length < _FEWEST_DRIVEN else frames

    def _in_order(
        self, actions: Sequence[Action], views: Sequence[Action]
    ) -> tuple[tuple[Action, ...], tuple[Action, ...], list[tuple[Instruction, Action]]]:
        """Actions before the first step, and of each step, with its instructions; leaves out unread views."""
        steps = self._loop.steps
        looked_at = {slot for step in steps for slot in step.reads}
        looked_at.update(slot for _, slot in (*self._copied, *self._carries.all))
        fixed, first, each = set(self._fixed), list(views), []
        for step, action in zip(steps, actions, strict=True):
            if isinstance(step, MakeView) and step.writes[0] not in looked_at:
                continue
            lasts = isinstance(step, MakeView) or (isinstance(step, Launch) and step.once)
            if lasts and fixed.issuperset(step.reads):
                fixed.update(step.writes)
                first.append(action)
            else:
                each.append((step, action))
        return tuple(first), tuple(action for _, action in each), each

    def __call__(self, registers: list) -> None:
        loop = self._loop
        *outs, scratch = [registers[slot] for slot in loop.writes]
        given = [registers[slot] for slot in loop.reads]
        carries, xs = loop.carries, loop.xs
        filled, others = self._in_memory(scratch)
        is_odd = loop.length % 2 == 1
        places = [(out, other) if is_odd else (other, out) for out, other in zip(outs, others, strict=False)]
        body = filled.copy()
        for slot, tensor in zip(self._fixed, given[carries + xs :], strict=True):
            body[slot] = tensor
        for make_view in self._first:
            make_view(body)
        for slot, tensor in zip(self._carries.slots, given, strict=False):
            body[slot] = tensor
        for register in self._unplaced:
            body[register.slot] = VF.empty(register.shape, dtype=register.torch_dtype, device=scratch.device)
        stacks = [_apart(out) for out in outs[carries:]]
        wholes = {slot: _filled_apart(given[carries + x]) for x, slot in self._parts}
        wholes |= {each.slot: _shaped(stacks[y], each.shape) for y, each in self._written}
        if self._frames is None:
            self._run_steps(body, wholes, places, stacks)
        else:
            turns = {slot: places[carry] for carry, slot in self._carries.turns}
            self._drive_steps(self._frames, body, wholes, turns)
        for out, slot in zip(outs, self._carries.slots, strict=False):
            if body[slot] is not out:
                out.copy_(body[slot])
        for out, stack in zip(outs[carries:], stacks, strict=True):
            if stack is not out:
                out.copy_(stack)

    def _run_steps(
        self,
        body: list,
        wholes: Mapping[int, torch.Tensor],
        places: Sequence[Sequence[torch.Tensor]],
        stacks: Sequence[torch.Tensor],
    ) -> None:
        """Runs all steps, one action after the other.

        Args:
            body: registers, all except per-step tensors filled.
            wholes: slot → the stacked tensor of which each step reads or writes a part.
            places: two of each carry.
            stacks: the ys.
        """
        actions = self._actions
        taken = {slot: self._steps_of(whole) for slot, whole in wholes.items()}
        taken |= {slot: cycle(places[carry]) for carry, slot in self._carries.turns}
        copied = [(slot, iter(self._steps_of(stacks[y]))) for y, slot in self._copied]
        moved = [(carry, slot, cycle(places[carry])) for carry, slot in self._carries.moved]
        lying = self._carries.following.items()
        slots = tuple(taken)
        for _, *row in zip(range(self._loop.length), *taken.values(), strict=False):
            for slot, tensor in zip(slots, row, strict=True):
                body[slot] = tensor
            for act in actions:
                act(body)
            for slot, targets in copied:
                next(targets).copy_(body[slot])
            following = [(carried, body[slot]) for carried, slot in lying]
            for carry, slot, targets in moved:
                following.append((self._carries.slots[carry], next(targets).copy_(body[slot])))
            for carried, tensor in following:
                body[carried] = tensor

    def _drive_steps(
        self,
        frames: LoopFrames,
        body: list,
        wholes: Mapping[int, torch.Tensor],
        turns: Mapping[int, Sequence[torch.Tensor]],
    ) -> None:
        """Runs all steps by a driver; ``turns``: slot → the places of a carry."""
        length, end = self._loop.length, 0 if self._loop.reverse else -1

        def first() -> list:
            registers = body.copy()
            for slot, whole in wholes.items():
                registers[slot] = whole[-1 - end]
            for slot, pair in turns.items():
                registers[slot] = pair[0]
            for _, make_view in self._views.each:
                make_view(registers)
            return registers

        addresses = self._addresses(frames.slots, body, wholes, turns)
        frames.run(length, first, addresses)
        for slot in self._views.ending.intersection(wholes):
            body[slot] = wholes[slot][end]
        for slot in self._views.ending.intersection(turns):
            body[slot] = turns[slot][(length - 1) % 2]
        for make_view in self._views.last:
            make_view(body)
        last = [(carry, body[slot]) for carry, slot in self._carries.following.items()]
        for carry, tensor in last:
            body[carry] = tensor

    def _addresses(
        self,
        slots: Sequence[int],
        body: Sequence,
        wholes: Mapping[int, torch.Tensor],
        turns: Mapping[int, Sequence[torch.Tensor]],
    ) -> dict[int, Addresses]:
        """Addresses of the slots' tensors in each step; ``body``: the tensors that stay, and the first carries."""
        found: dict[int, Addresses] = {}

        def address(slot: int) -> Addresses:
            if slot not in found:
                found[slot] = make(slot)
            return found[slot]

        def make(slot: int) -> Addresses:
            if slot in wholes:
                whole = wholes[slot]
                step = whole.stride(0) * whole.element_size()
                begin = whole.data_ptr()
                if self._loop.reverse:
                    begin, step = begin + (len(whole) - 1) * step, -step
                return Addresses(begin, begin + step, begin + 2 * step, 2 * step)
            if slot in turns:
                here, there = (place.data_ptr() for place in turns[slot])
                return Addresses(here, there, here, 0)
            if slot in self._carries.following:
                before = address(self._carries.following[slot])
                return Addresses(body[slot].data_ptr(), before.first, before.second, before.added)
            if slot in self._views.bases:
                base, count = self._views.bases[slot]
                return address(base).behind(count)
            here = body[slot].data_ptr()
            return Addresses(here, here, here, 0)

        return {slot: address(slot) for slot in slots}

    def _steps_of(self, whole: torch.Tensor) -> Sequence[torch.Tensor]:
        """The parts of a stacked tensor, in the order of execution."""
        parts = whole.unbind(0)
        return parts[::-1] if self._loop.reverse else parts

    @torch.inference_mode(False)  # they serve calls of any mode
    def _in_memory(self, scratch: torch.Tensor) -> tuple[list, list[torch.Tensor]]:
        """The body's registers with its arena filled, and :meth:`_places`; cached as long as ``scratch`` lives."""
        found = self._lying.get(scratch)
        if found is None:
            memory = scratch.data  # views of the tensor itself would keep it
            filled: list = [None] * self._loop.layout.size
            self._loop.layout.fill(filled, memory)
            found = self._lying[scratch] = filled, self._places(memory)
        return found

    def _places(self, scratch: torch.Tensor) -> list[torch.Tensor]:
        """A tensor for each carry, after the body's arena."""
        begin = _aligned(self._loop.layout.arena_bytes)
        places = []
        for register in self._loop.layout.params[: self._loop.carries]:
            places.append(_tensor(register, scratch, begin))
            begin += _aligned(register.nbytes)
        return places


def _apart(whole: torch.Tensor) -> torch.Tensor:
    """A stacked tensor if its parts are aligned for vector reads, else new memory with padding between parts."""
    part = whole[0]
    if whole.device == HOST or not part.nbytes % ACCESS:
        return whole
    elements = ACCESS // part.element_size()
    gapped = whole.new_empty(len(whole), -(-part.numel() // elements) * elements)
    return gapped[:, : part.numel()].view(whole.shape)


def _filled_apart(whole: torch.Tensor) -> torch.Tensor:
    """:func:`_apart` with the tensor's values."""
    apart = _apart(whole)
    return whole if apart is whole else apart.copy_(whole)


def _shaped(whole: torch.Tensor, part: Sequence[int]) -> torch.Tensor:
    """A stacked tensor with its dense parts in another shape."""
    if tuple(whole.shape[1:]) == tuple(part):
        return whole
    return whole.as_strided((len(whole), *part), (whole.stride(0), *dense_strides(part)))


def _memory_of(slot: int, loop: RunLoop) -> int:
    """The slot of the fresh tensor that ``slot`` is a contiguous view of, in full; otherwise ``slot``."""
    views = {step.writes[0]: step for step in loop.steps if isinstance(step, MakeView)}
    fresh = {register.slot: register for register in loop.layout.fresh}
    view = views.get(slot)
    if view is None or view.reads[0] not in fresh or view.offset:
        return slot
    of = fresh[view.reads[0]]
    is_all = view.strides == dense_strides(view.shape) and math.prod(view.shape) == of.numel
    return of.slot if is_all else slot


def _tensor(register: Register, memory: torch.Tensor, begin: int) -> torch.Tensor:
    if not register.numel:
        return VF.empty(register.shape, dtype=register.torch_dtype, device=memory.device)
    return memory[begin : begin + register.nbytes].view(register.torch_dtype).view(register.shape)
