"""Loops at run time: a loop instruction and its body's actions → a function of the registers.

A part of a tensor with the steps in front is a view, and a kernel of the body writes a result straight into the part
that it is. A carry that is such a part is read from there in the next step; another one is written by turns into two
places, so that no step writes what it reads.

Kernels on a GPU read vectors of 16 bytes. Where parts do not all begin at a multiple of that, they are those of a copy
with gaps between them: one copy for all steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from bridge.base.devices import HOST
from bridge.compile.runtime.arena import ALIGNMENT
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
    """Every list is of pairs: a slot of the body, and whose it is, by number."""

    def __init__(self, loop: Loop, actions: Sequence[Action], views: Sequence[Action]):
        self._loop, self._actions, self._views = loop, tuple(actions), tuple(views)
        layout, carries, xs = loop.layout, loop.carries, loop.xs
        slots = [param.slot for param in layout.params]
        self._carried = slots[:carries]
        self._parts = list(enumerate(slots[carries : carries + xs]))
        self._fixed = [*slots[carries + xs :], *loop.constants]
        lasting = set(slots[carries:])
        fresh = {register.slot for register in layout.fresh}
        home: dict[int, int] = {}  # the y that a result is written into
        for y, slot in enumerate(layout.results[carries:]):
            if slot in fresh:
                home.setdefault(slot, y)
        self._written = [(y, slot) for slot, y in home.items()]
        self._copied = [(y, slot) for y, slot in enumerate(layout.results[carries:]) if home.get(slot) != y]
        self._turns: list[tuple[int, int]] = []  # carries that are written into their places
        self._kept: list[tuple[int, int]] = []  # those that lie somewhere where they stay
        self._moved: list[tuple[int, int]] = []  # those that have to be copied into their places
        taken = set(home)
        for carry, slot in enumerate(layout.results[:carries]):
            if slot in home or slot in lasting:
                self._kept.append((carry, slot))
            elif slot in fresh and slot not in taken:
                self._turns.append((carry, slot))
                taken.add(slot)
            else:
                self._moved.append((carry, slot))
        self._unplaced = [
            register for register in layout.fresh if register.slot not in taken
        ]  # results are views of it

    def __call__(self, registers: list) -> None:
        loop, layout, actions = self._loop, self._loop.layout, self._actions
        *outs, scratch = [registers[slot] for slot in loop.writes]
        given = [registers[slot] for slot in loop.reads]
        carries, xs = loop.carries, loop.xs
        body: list = [None] * layout.size
        layout.fill(body, scratch)
        for slot, tensor in zip(self._fixed, given[carries + xs :], strict=True):
            body[slot] = tensor
        for make_view in self._views:
            make_view(body)
        for slot, tensor in zip(self._carried, given, strict=False):
            body[slot] = tensor
        for register in self._unplaced:
            body[register.slot] = torch.empty(register.shape, dtype=register.torch_dtype, device=scratch.device)
        places = self._places(scratch)
        parts = [(slot, _filled_apart(given[carries + x]).unbind(0)) for x, slot in self._parts]
        stacks = [_apart(out) for out in outs[carries:]]
        ys = [stack.unbind(0) for stack in stacks]
        written = [(slot, ys[y]) for y, slot in self._written]
        copied = [(ys[y], slot) for y, slot in self._copied]
        order = range(loop.length)
        for count, step in enumerate(reversed(order) if loop.reverse else order):
            for slot, tensors in parts:
                body[slot] = tensors[step]
            for slot, tensors in written:
                body[slot] = tensors[step]
            turn = count % 2
            for carry, slot in self._turns:
                body[slot] = places[carry][turn]
            for act in actions:
                act(body)
            for tensors, slot in copied:
                tensors[step].copy_(body[slot])
            following = [(carry, body[slot]) for carry, slot in (*self._turns, *self._kept)]
            for carry, slot in self._moved:
                following.append((carry, places[carry][turn].copy_(body[slot])))
            for carry, tensor in following:
                body[self._carried[carry]] = tensor
        for out, slot in zip(outs, self._carried, strict=False):
            out.copy_(body[slot])
        for out, stack in zip(outs[carries:], stacks, strict=True):
            if stack is not out:
                out.copy_(stack)

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


def _tensor(register: Register, memory: torch.Tensor, begin: int) -> torch.Tensor:
    if not register.numel:
        return torch.empty(register.shape, dtype=register.torch_dtype, device=memory.device)
    return memory[begin : begin + register.nbytes].view(register.torch_dtype).view(register.shape)
