"""A recorder on the host: a recording is the addresses of a run, and replaying it computes there again, as a GPU would.

A recording keeps no memory alive, so a test finds reads and writes after the owner let go; memory of results is handed
out by address, lowest first, to requests for as many bytes.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from bridge.base.tensor_properties import span_of
from bridge.base.torch_internals import empty_strided
from bridge.compile.cuda.memory import bytes_of, places_of, rooms_of
from bridge.compile.runtime.executor import Executor


@torch.inference_mode(False)  # replays run in any mode
def alias(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the same memory, which its owner frees."""
    if not tensor.numel():
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    memory = (ctypes.c_char * (span_of(tensor.shape, tensor.stride()) * tensor.itemsize)).from_address(
        tensor.data_ptr()
    )
    return torch.frombuffer(memory, dtype=torch.uint8).view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


def memories(first, others, outputs):
    """The memories of results: the first ones in one memory, all others in another."""
    return lambda result: first if result < outputs else others


class HostMemory:
    """Blocks that are free when no tensor lies in them."""

    grown = 0

    def __init__(self) -> None:
        self._blocks: list[torch.Tensor] = []

    def __call__(self, forms):
        return [self._tensor(*form) for form in forms]

    def _tensor(self, shape, strides, dtype):
        size = max(torch.Size(shape).numel(), 1) * dtype.itemsize
        block = next((block for block in self._blocks if len(block) == size and _is_free(block)), None)
        if block is None:
            self._blocks.append(block := _block(size))
        return torch.empty(0, dtype=dtype).set_(block.untyped_storage(), 0, shape, strides)

    @property
    def held_bytes(self):
        return sum(map(len, self._blocks))


class HostSlots:
    """Slots with room for the largest tensor so far of each: tensors that are taken together keep their addresses."""

    def __init__(self) -> None:
        self._slots: list[tuple[torch.Tensor, tuple[int, ...]]] = []
        self.grown = 0

    def __call__(self, forms):
        free = next((place for place, (slot, _) in enumerate(self._slots) if _is_free(slot)), None)
        before = () if free is None else self._slots[free][1]
        rooms = rooms_of(bytes_of(forms), before)
        if free is None:
            free = len(self._slots)
            self._slots.append((_block(sum(rooms)), rooms))
        elif rooms != before:
            self.grown += 1
            self._slots[free] = _block(sum(rooms)), rooms
        slot = self._slots[free][0]
        bases = [slot[place:] for place in places_of(rooms)]
        return [
            torch.empty(0, dtype=dtype).set_(base.untyped_storage(), base.storage_offset() // dtype.itemsize, *form)
            for base, (*form, dtype) in zip(bases, forms, strict=True)
        ]

    @property
    def held_bytes(self):
        return sum(len(slot) for slot, _ in self._slots)


def _block(size):
    block = torch.empty(size + 16, dtype=torch.uint8)
    return block[-block.data_ptr() % 16 :][:size].clone()


def _is_free(block):
    return torch._C._storage_Use_Count(block.untyped_storage()._cdata) == 2  # the block's, and this one


class _Timer:
    def __init__(self, recorder):
        self._recorder, self._has_stopped, self.is_disturbed = recorder, False, False

    def stop(self):
        self._recorder.stopped += 1
        self._has_stopped, self.is_disturbed = True, self._recorder.disturbed

    def seconds(self):
        if not self._has_stopped:
            raise RuntimeError("Both events must be recorded before calculating elapsed time")
        return self._recorder.seconds


class HostRecorder:
    """Settable: a GPU's answers. ``recorded`` counts recordings; ``fails``: raised by the next ones."""

    def __init__(self, program: Any):
        self.program = program
        self.recorded = self.replayed = self.stopped = 0
        self.fails: Exception | None = None
        self.capturing = False
        self.refuses: str | None = None
        self.now: Any = 0
        self.seconds: tuple[float, float] | None = (1.0, 1.0)
        self.disturbed = False
        self.spare = 1 << 40

    def refusal(self):
        return self.refuses

    def elsewhere(self):
        return None

    def spare_bytes(self, wanted):
        return self.spare

    def is_capturing(self):
        return self.capturing

    def stream(self):
        return self.now

    def memory(self, varies=False, joined=False):
        return HostSlots() if varies or joined else HostMemory()

    def empty(self, form):
        return empty_strided(*form)

    def timer(self):
        return _Timer(self)

    def record(self, inputs, fresh, copies):
        if self.fails is not None:
            raise self.fails
        program = self.program
        execute = Executor(program, torch.device("cpu"), prepare=lambda: None)
        read, written = list(map(alias, inputs)), list(map(alias, fresh))
        copied = [(place, alias(memory)) for place, memory in copies]
        self.recorded += 1

        on_host = [place for place, each in enumerate(program.layout.params) if each.lies_on_host]

        def replay(given):
            self.replayed += 1
            for place in on_host:
                read[place] = given[place]
            results = execute(read, fresh=written)
            for place, memory in copied:
                memory.copy_(results[place])

        return replay
