"""Recorded graphs of one entry: its programs → executors that record them, with memory for results that they share."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch

from bridge.compile.graphs.control import RecordedGraphs
from bridge.compile.graphs.executor import GraphedExecutor
from bridge.compile.graphs.recorder import Memory, Recorder
from bridge.compile.graphs.shared import Shared
from bridge.compile.runtime.program import Program

__all__ = ["EntryGraphs"]

Execute = Callable[..., list[torch.Tensor]]


class EntryGraphs:
    """What the recorded programs of an entry share, for all sizes.

    There is a memory for each use: who keeps outputs, or gradients, is not to move the addresses of the others. Where
    sizes vary, each result that varies has one of its own. What is let go together lies in one block: new values of
    buffers, and captures.

    Attributes:
        last_used: never: there is nothing to drop; ``recording_bytes``, ``graph_bytes``: none.
    """

    last_used = recording_bytes = graph_bytes = 0

    def __init__(self, control: RecordedGraphs):
        self._control = control
        self._memories: dict[Hashable, Memory] = {}
        self._shared: dict[Program, Shared] = {}
        control.enroll(self)

    def forward(self, program: Program, execute: Execute, whole: Program, outputs: int, captures: int) -> Execute:
        """What runs a forward program.

        Args:
            program: of numbers only; ``whole``: the one of all sizes that it was made of, or itself.
            execute: runs it, kernel by kernel.
            outputs: how many of its results, the first, are the caller's.
            captures: the first result that is for the backward; those in between are for the call itself.
        """
        return self._graphed(program, execute, whole, "outputs", (outputs, captures))

    def backward(self, program: Program, execute: Execute, whole: Program, grad_outs: int) -> Execute:
        """What runs a backward program, whose last inputs are so many grad_outs.

        That of a loss is copied for each replay: autograd makes it where there is room, and a recording for each place
        would cost more.
        """
        params = program.layout.params
        first = len(params) - grad_outs
        numbers = [place for place, each in enumerate(params) if place >= first and each.numel == 1]
        return self._graphed(program, execute, whole, "gradients", (len(program.layout.results),) * 2, numbers)

    def _graphed(
        self,
        program: Program,
        execute: Execute,
        whole: Program,
        use: str,
        bounds: tuple[int, int],
        buffered: Sequence[int] = (),
    ) -> Execute:
        recorder = program.backend.recorder(program)
        if recorder is None:
            return execute
        shared = self._shared.get(whole)
        if shared is None:
            shared = self._shared.setdefault(whole, Shared(program is not whole, self._moves, buffered=buffered))
        varying = _varying(whole) if shared.varies else ()

        def memory_of(result: int) -> Memory:
            if result >= bounds[1]:
                return self._memory("captures", recorder, shared.varies, joined=True)
            if result >= bounds[0]:
                return self._memory("buffers", recorder, shared.varies, joined=True)
            if result in varying:
                return self._memory((whole, result), recorder, varies=True)
            return self._memory(use, recorder)

        return GraphedExecutor(program, execute, recorder, self._control, memory_of, shared)

    def _memory(self, use: Hashable, recorder: Recorder, varies: bool = False, joined: bool = False) -> Memory:
        found = self._memories.get(use)
        return self._memories.setdefault(use, recorder.memory(varies, joined)) if found is None else found

    def _moves(self) -> int:
        """How often memory of results had to move."""
        return sum(memory.grown for memory in tuple(self._memories.values()))

    @property
    def held_bytes(self) -> int:
        """Bytes that the device has set aside for results."""
        return sum(memory.held_bytes for memory in tuple(self._memories.values()))

    def __len__(self) -> int:
        return 0

    def drop(self) -> None:
        """Nothing: who holds a tensor keeps its memory."""


def _varying(program: Program) -> frozenset[int]:
    """Results of a program of many sizes whose memory is not the same in all of them."""
    layout = program.layout
    fixed = {made.slot for made in layout.fresh if all(type(extent) is int for extent in made.shape)}
    return frozenset(place for place, slot in enumerate(layout.memory) if slot not in fixed)
