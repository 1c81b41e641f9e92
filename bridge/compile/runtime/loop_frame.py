"""Loops as instructions: a body, its registers for one step, and the tensors that pass from step to step.

Loop frames: a step's launches as data in memory, which a driver runs for many steps without Python. A frame holds the
data of the calling convention: tensor descriptors, arguments, calls. The driver updates the addresses in it for each
step: between steps, an address alternates between two places, advances by a part of a tensor, or stays; so the address
two steps later is the current one plus a constant.
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
from bridge.compile.runtime.instructions import Allocate, CallLibrary, Launch, MakeView, StepContents
from bridge.compile.runtime.layout import RegisterLayout

__all__ = ["Addresses", "Drive", "Instruction", "LoopFrames", "RunLoop", "inner_steps", "is_framed"]


@dataclass(frozen=True)
class RunLoop:
    """Runs a body for ``length`` steps (an extent is known when the program is bound), the last first if ``reverse``.

    ``reads``: the initial carries, stacked tensors of which each step reads its part, tensors that every step reads,
    then ``constants``, which fill these slots of the body. ``writes``: the last carries, stacked tensors of which each
    step fills its part, and scratch memory: the body's arena and a place for each carry.

    The body has its own registers: parameters are carries, xs' parts, and common tensors; results are carries, parts.
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

    def __str__(self) -> str:
        order = ", last first" if self.reverse else ""
        head = f"{', '.join(self.outputs)} = {self.name} of {self.length} steps{order}({', '.join(self.inputs)})"
        return "\n".join([head, *(f"      {step}" for step in self.steps)])


Instruction = Launch | CallLibrary | MakeView | RunLoop | Allocate


def inner_steps(steps: Iterable[Instruction]) -> Iterator[Instruction]:
    """All instructions, each loop followed by the instructions of its body."""
    for step in steps:
        yield step
        if isinstance(step, RunLoop):
            yield from inner_steps(step.steps)


Drive = Callable[[int, int, int, int, int], None]
"""``drive(steps, calls, number of calls, places, number of places)``: runs the calls once per step after updating the
addresses. Calls and places are int64 memory: three numbers per call (function, arguments, their number), five per place
(where, its values in the first three steps, the increment of two steps from the second one on)."""

_POINTER, _TENSOR = 4, 7
"""TVM's type codes of arguments: an address, a DLTensor's address."""

_WORDS = 6
"""8-byte words of a DLTensor: address, device, dimensions and type, shape, strides, offset."""

_KINDS = {
    **{torch.int8: 0, torch.int16: 0, torch.int32: 0, torch.int64: 0, torch.uint8: 1},
    **{torch.float16: 2, torch.float32: 2, torch.float64: 2, torch.bfloat16: 4, torch.bool: 6},
}
"""DLPack's type codes."""

_CPU = 1
"""DLPack's device code."""


class Addresses(NamedTuple):
    """A tensor's addresses in the first three steps, and the increment of two steps from the second one on."""

    first: int
    second: int
    third: int
    added: int

    def behind(self, count: int) -> Addresses:
        """These addresses plus ``count`` bytes."""
        return Addresses(self.first + count, self.second + count, self.third + count, self.added)


def is_framed(launches: Sequence[tuple[Launch, Callable]]) -> bool:
    """Whether a driver can call the functions of these launches by address."""
    return bool(launches) and all(isinstance(function, tvm_ffi.Function) for _, function in launches)


class LoopFrames:
    """The frames of one loop: one for each concurrent run.

    Attributes:
        slots: the registers that launches read and write.
    """

    def __init__(self, launches: Sequence[tuple[Launch, Callable, int | None]], drive: Drive):
        """``launches``: each with its function and the address of its integers, or ``None``."""
        self._launches, self._drive = launches, drive
        self.slots = list(dict.fromkeys(slot for launch, *_ in launches for slot in (*launch.reads, *launch.writes)))
        self._free: list[_Frame] = []

    def run(self, steps: int, registers: Callable[[], Sequence], addresses: Mapping[int, Addresses]) -> None:
        """Runs ``steps`` steps.

        Args:
            registers: makes the tensors of some step, for their shapes; called for a new frame.
            addresses: of each of ``slots``.
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
    """Attributes: ``calls``, ``places``: addresses of the driver's arguments; ``moving``: for each place, the slot and
    the offset in bytes from the slot's address."""

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
        self._memory = memory  # keeps it alive

    def _moves(self, slot: int, behind: int, where: int, wheres: list[int]) -> None:
        self.moving.append((slot, behind))
        wheres.append(where)

    def place(self, addresses: Mapping[int, Addresses]) -> None:
        """Sets the addresses from the first step on."""
        found = [addresses[slot].behind(behind) if behind else addresses[slot] for slot, behind in self.moving]
        for word, numbers in enumerate(zip(*found, strict=True), start=1):
            self._placed[word::5] = numbers


class _Memory:
    """Keeps 8-byte numbers in memory at fixed addresses."""

    def __init__(self) -> None:
        self._kept: list = []

    def put(self, words: Sequence[int]) -> int:
        """Stores numbers; returns their address."""
        array = (ctypes.c_int64 * max(len(words), 1))(*words)
        self._kept.append(array)
        return ctypes.addressof(array)


def _described(tensor: torch.Tensor, memory: _Memory) -> list[int]:
    """A DLTensor whose address is set later."""
    assert tensor.device == HOST, tensor.device
    bits = 8 * tensor.element_size()
    kind = tensor.ndim | _KINDS[tensor.dtype] << 32 | bits << 40 | 1 << 48
    made = [0, _CPU, kind, memory.put(tensor.shape), memory.put(tensor.stride()), 0]
    assert len(made) == _WORDS
    return made
