"""Loops as instructions: a body, its registers for one step, and what lies where between steps.

Loop frames: a step's launches as data in memory, which a driver runs for many steps without Python.
A frame holds what the calling convention wants of a call: tensors' descriptions, arguments, calls. The addresses in it
are put there for each step: from one step to the next they alternate between two places, or move on by a part of a
tensor, or stay; so the address two steps later is this one and a constant more.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import tvm_ffi

from autodiff.extents import Dim
from bridge.base.devices import HOST
from bridge.compile.runtime.instructions import CallLibrary, Launch, MakeView, StepContents
from bridge.compile.runtime.layout import RegisterLayout

__all__ = ["Addresses", "Drive", "Instruction", "LoopFrames", "RunLoop", "inner_steps", "is_framed"]


@dataclass(frozen=True)
class RunLoop:
    """A body that is run ``length`` times (an extent is known when the program is bound), from the last step to the
    first with ``reverse``.

    ``reads``: the initial carries, tensors with the steps in front, of which each step reads its part, what every step
    reads, then ``constants`` that fill those slots of the body, then the parts of xs that lie ``apart`` (see
    :class:`~bridge.compile.loop_ir.graph.LoopCall`). ``writes``: the last carries, tensors with the steps in
    front, of which each step fills its part, and scratch memory: the body's arena and a place for each carry.

    The body's registers are its own: parameters are carries, ``xs`` parts and what every step reads; results are the
    next carries, then parts.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    steps: tuple[Instruction, ...] = field(repr=False)
    layout: RegisterLayout = field(repr=False)
    carries: int
    xs: int
    length: Dim
    reverse: bool = False
    constants: tuple[int, ...] = ()
    contents: StepContents = field(default=StepContents(), repr=False)
    apart: tuple[int, ...] = ()

    def __str__(self) -> str:
        order = ", last first" if self.reverse else ""
        head = f"{', '.join(self.outputs)} = {self.name} of {self.length} steps{order}({', '.join(self.inputs)})"
        return "\n".join([head, *(f"      {step}" for step in self.steps)])


Instruction = Launch | CallLibrary | MakeView | RunLoop


def inner_steps(steps: Iterable[Instruction]) -> Iterator[Instruction]:
    """Instructions, each loop followed by those of its body."""
    for step in steps:
        yield step
        if isinstance(step, RunLoop):
            yield from inner_steps(step.steps)


Drive = Callable[[int, int, int, int, int], None]
"""``drive(steps, calls, how many, places, how many)``: runs the calls so many times, addresses put into place before
each time. Both are memory of int64: three a call (function, arguments, their number), five a place (where, the
addresses of the first three steps, what two steps add from the second one on)."""

_POINTER, _TENSOR = 4, 7
"""Of TVM's types of arguments: an address, a DLTensor's address."""

_WORDS = 6
"""Of 8 bytes, of a DLTensor: address, device, dimensions and type, shape, strides, offset."""

_KINDS = {
    **{torch.int8: 0, torch.int16: 0, torch.int32: 0, torch.int64: 0, torch.uint8: 1},
    **{torch.float16: 2, torch.float32: 2, torch.float64: 2, torch.bfloat16: 4, torch.bool: 6},
}
"""DLPack's numbers of kinds of elements."""

_CPU = 1
"""DLPack's number of the device."""


class Addresses(NamedTuple):
    """Of a tensor in the first three steps, and what two steps add from the second one on."""

    first: int
    second: int
    third: int
    added: int

    def behind(self, count: int) -> Addresses:
        """Those of what lies so many bytes behind."""
        return Addresses(self.first + count, self.second + count, self.third + count, self.added)

    def at(self, step: int) -> int:
        """The address in a step, by number."""
        if not step:
            return self.first
        return (self.second if step % 2 else self.third) + (step - 1) // 2 * self.added


def is_framed(launches: Sequence[tuple[Launch, Callable]]) -> bool:
    """Whether the functions of these launches can be called by their addresses."""
    return bool(launches) and all(isinstance(function, tvm_ffi.Function) for _, function in launches)


class LoopFrames:
    """The frames of one loop: one for each run that goes on at a time.

    Attributes:
        slots: the registers that launches read and write.
    """

    def __init__(self, launches: Sequence[tuple[Launch, Callable, int | None]], drive: Drive):
        """``launches``: each with its function and the address of its integers, ``None`` if it has none."""
        self._launches, self._drive = launches, drive
        self.slots = list(dict.fromkeys(slot for launch, *_ in launches for slot in (*launch.reads, *launch.writes)))
        self._free: list[_Frame] = []

    def run(self, steps: int, registers: Callable[[], Sequence], addresses: Mapping[int, Addresses]) -> None:
        """Runs so many steps.

        Args:
            registers: makes tensors of some step, for their shapes; called where a frame is made.
            addresses: by slot, of each of ``slots``.
        """
        try:
            frame = self._free.pop()
        except IndexError:
            frame = _Frame(self._launches, registers())
        try:
            frame.place(addresses)
            self._drive(steps, frame.calls, len(self._launches), frame.places, len(frame.moving))
        finally:
            self._free.append(frame)


class _Frame:
    """Attributes: ``calls``, ``places``: addresses of what a driver reads; ``moving``: each place's slot and the bytes
    that it points behind the slot's address."""

    def __init__(self, launches: Sequence[tuple[Launch, Callable, int | None]], registers: Sequence):
        tensors = dict.fromkeys(
            slot for launch, *_ in launches if launch.offsets is None for slot in (*launch.reads, *launch.writes)
        )
        memory = _Memory()
        self.moving: list[tuple[int, int]] = []
        wheres: list[int] = []
        for slot in tensors:
            tensors[slot] = at = memory.put(_described(registers[slot], memory))
            self._moves(slot, 0, at, wheres)
        calls: list[int] = []
        for launch, function, integers in launches:
            slots = (*launch.reads, *launch.writes)
            if launch.offsets is None:
                values = [(_TENSOR, tensors[slot]) for slot in slots]
            else:
                values = [(_POINTER, 0)] * len(slots)
            values += [] if integers is None else [(_POINTER, integers)]
            given = memory.put([word for value in values for word in value])
            if launch.offsets is not None:
                for index, (slot, behind) in enumerate(zip(slots, launch.offsets, strict=True)):
                    self._moves(slot, behind, given + 16 * index + 8, wheres)
            calls += [function.__chandle__(), given, len(values)]
        self.calls = memory.put(calls)
        self._placed = (ctypes.c_int64 * (5 * len(wheres)))()
        self._placed[::5] = wheres
        self.places = ctypes.addressof(self._placed)
        self._memory = memory  # alive as long as this

    def _moves(self, slot: int, behind: int, where: int, wheres: list[int]) -> None:
        self.moving.append((slot, behind))
        wheres.append(where)

    def place(self, addresses: Mapping[int, Addresses]) -> None:
        """The addresses from the first step on."""
        found = [addresses[slot].behind(behind) if behind else addresses[slot] for slot, behind in self.moving]
        for word, numbers in enumerate(zip(*found, strict=True), start=1):
            self._placed[word::5] = numbers


class _Memory:
    """Numbers of 8 bytes in memory that stays."""

    def __init__(self) -> None:
        self._kept: list = []

    def put(self, words: Sequence[int]) -> int:
        """The address of these numbers."""
        array = (ctypes.c_int64 * max(len(words), 1))(*words)
        self._kept.append(array)
        return ctypes.addressof(array)


def _described(tensor: torch.Tensor, memory: _Memory) -> list[int]:
    """A DLTensor whose address is put into place later."""
    assert tensor.device == HOST, tensor.device
    bits = 8 * tensor.element_size()
    kind = tensor.ndim | _KINDS[tensor.dtype] << 32 | bits << 40 | 1 << 48
    made = [0, _CPU, kind, memory.put(tensor.shape), memory.put(tensor.stride()), 0]
    assert len(made) == _WORDS
    return made
