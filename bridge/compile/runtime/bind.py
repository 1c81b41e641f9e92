"""Binding: an instruction → a function of the registers, with everything else that it needs looked up once."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from operator import add

import torch

from bridge.base.devices import HOST
from bridge.base.pytrees import picker
from bridge.compile.runtime.instructions import CallLibrary, Launch, MakeView
from bridge.compile.runtime.loop import loop_action
from bridge.compile.runtime.loop_frame import Drive, Instruction, LoopFrames, RunLoop, is_framed
from bridge.library import FUNCTIONS, OUT_KERNELS, invoke

__all__ = ["Action", "Arrays", "bind", "last_uses"]

Action = Callable[[list], None]
"""An instruction as a function of the registers."""


_ADDRESS = torch.Tensor.data_ptr

Arrays = dict[tuple[int, ...], tuple[torch.Tensor, ctypes.c_void_p]]
"""Integers as int64 in memory, and where that is."""


def bind(
    instruction: Instruction, functions: Mapping[str, Callable], arrays: Arrays, drive: Drive | None = None
) -> Action:
    """The action of an instruction; ``functions`` are the program's kernels by name, ``arrays`` what its launches pass,
    one for all that pass the same; ``drive`` runs the steps of loops.

    ``KeyError`` for a kernel that is in neither ``functions`` nor :mod:`bridge.library`.
    """
    match instruction:
        case MakeView():
            return _view(instruction)
        case CallLibrary():
            return _library(instruction)
        case RunLoop():
            actions = [bind(step, functions, arrays, drive) for step in instruction.steps]
            views = [bind(view, {}, {}) for view in instruction.layout.views]
            return loop_action(instruction, actions, views, _frames(instruction, functions, arrays, drive))
        case Launch(offsets=None):
            return _launch(instruction, functions[instruction.name], arrays)
        case Launch():
            return _launch_at_addresses(instruction, functions[instruction.name], arrays)


def _frames(loop: RunLoop, functions: Mapping[str, Callable], arrays: Arrays, drive: Drive | None) -> LoopFrames | None:
    """What runs a loop's launches by a driver; ``None`` if there is none, or they are not all."""
    launches = [step for step in loop.steps if isinstance(step, Launch) and not step.once]
    found = [(launch, functions[launch.name]) for launch in launches]
    if drive is None or not is_framed(found) or any(not isinstance(step, (Launch, MakeView)) for step in loop.steps):
        return None
    integers = [_array(launch.scalars, arrays)[1].value if launch.scalars else None for launch in launches]
    return LoopFrames([(*each, number) for each, number in zip(found, integers, strict=True)], drive)


def last_uses(instructions: Sequence[Instruction], kept: Collection[int]) -> list[tuple[int, ...]]:
    """After each instruction, the slots that it and no later one uses, but for those that are ``kept``."""
    needed = set(kept)
    uses = []
    for instruction in reversed(instructions):
        last = {*instruction.reads, *instruction.writes} - needed
        needed |= last
        uses.append(tuple(sorted(last)))
    return uses[::-1]


# What an action needs is bound as arguments: a closure has an object for each thing in it, all of which the garbage
# collector walks through, and there are as many as sizes times steps.


def _view(view: MakeView) -> Action:
    (base,), (slot,) = view.reads, view.writes
    return partial(_make_view, base, slot, view.shape, view.strides, view.offset)


def _make_view(
    base: int, slot: int, shape: tuple[int, ...], strides: tuple[int, ...], offset: int, registers: list
) -> None:
    tensor = registers[base]
    registers[slot] = tensor.as_strided(shape, strides, tensor.storage_offset() + offset)


def _library(call: CallLibrary) -> Action:
    reads, writes, attrs = call.reads, call.writes, call.attrs
    if not call.allocates:
        return partial(_write, OUT_KERNELS[call.name], picker(writes), picker(reads), attrs)
    values = [list(value) if isinstance(value, tuple) else value for value in attrs]  # torch's lists of integers
    return partial(_allocate, FUNCTIONS[call.name], values, reads, writes)


def _write(write: Callable, outs: Callable, args: Callable, attrs: tuple, registers: list) -> None:
    write(outs(registers), args(registers), *attrs)


def _allocate(
    function: Callable, values: list, reads: tuple[int, ...], writes: tuple[int, ...], registers: list
) -> None:
    made = invoke(function, values, [registers[slot] for slot in reads])
    for slot, tensor in zip(writes, made, strict=True):
        registers[slot] = tensor


def _launch(launch: Launch, kernel: Callable, arrays: Arrays) -> Action:
    slots = (*launch.reads, *launch.writes)
    if launch.scalars:
        return partial(_run_with_scalars, kernel, picker(slots), *_array(launch.scalars, arrays))
    return partial(_run, kernel, picker(slots))


def _run(kernel: Callable, pick: Callable[[list], Sequence], registers: list) -> None:
    kernel(*pick(registers))


def _run_with_scalars(
    kernel: Callable, pick: Callable[[list], Sequence], _alive: torch.Tensor, where: ctypes.c_void_p, registers: list
) -> None:
    kernel(*pick(registers), where)


def _launch_at_addresses(launch: Launch, kernel: Callable, arrays: Arrays) -> Action:
    """The geometry of views is in the scalars, so none of them is made at a call."""
    pick = picker((*launch.reads, *launch.writes))
    return partial(_run_at_addresses, kernel, pick, launch.offsets, *_array(launch.scalars, arrays))


def _run_at_addresses(
    kernel: Callable,
    pick: Callable[[list], Sequence],
    behind: tuple[int, ...],
    _alive: torch.Tensor,
    where: ctypes.c_void_p,
    registers: list,
) -> None:
    kernel(*map(ctypes.c_void_p, map(add, map(_ADDRESS, pick(registers)), behind)), where)


def _array(scalars: tuple[int, ...], arrays: Arrays) -> tuple[torch.Tensor, ctypes.c_void_p]:
    if scalars not in arrays:
        tensor = torch.tensor(scalars, dtype=torch.int64, device=HOST)
        arrays[scalars] = tensor, ctypes.c_void_p(tensor.data_ptr())
    return arrays[scalars]
