"""Recorded graphs of one entry: its programs → executors that record them, with memory for results that they share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from bridge.compile.graphs.control import RecordedGraphs
from bridge.compile.graphs.executor import GraphedExecutor
from bridge.compile.graphs.recorder import Memory, Recorder
from bridge.compile.graphs.worth import Verdicts
from bridge.compile.runtime.program import Program

__all__ = ["EntryGraphs"]

Execute = Callable[..., list[torch.Tensor]]


class EntryGraphs:
    """What the recorded programs of an entry share, for all sizes.

    There is a memory for each use: who keeps outputs, or gradients, is not to move the addresses of the others.

    Attributes:
        last_used: never: there is nothing to drop.
    """

    last_used = 0

    def __init__(self, control: RecordedGraphs):
        self._control = control
        self._memories: dict[str, Memory] = {}
        self._verdicts: dict[tuple[str, int], Verdicts] = {}  # by what is the same for all sizes
        control.enroll(self)

    def forward(self, program: Program, execute: Execute, outputs: int) -> Execute:
        """What runs a forward program, whose results after the first ``outputs`` are for the backward."""
        return self._graphed(program, execute, ("outputs", "captures"), outputs)

    def backward(self, program: Program, execute: Execute) -> Execute:
        """What runs a backward program."""
        return self._graphed(program, execute, ("gradients", "gradients"), 0)

    def _graphed(self, program: Program, execute: Execute, uses: Sequence[str], outputs: int) -> Execute:
        recorder = program.backend.recorder(program)
        if recorder is None:
            return execute
        memories = tuple(self._memory(use, recorder) for use in uses)
        verdicts = self._verdicts.setdefault((program.name, len(program.steps)), Verdicts())
        return GraphedExecutor(program, execute, recorder, self._control, memories, outputs, verdicts)

    def _memory(self, use: str, recorder: Recorder) -> Memory:
        found = self._memories.get(use)
        return self._memories.setdefault(use, recorder.memory()) if found is None else found

    @property
    def held_bytes(self) -> int:
        """Bytes that the device has set aside for results."""
        return sum(memory.held_bytes for memory in tuple(self._memories.values()))

    def __len__(self) -> int:
        return 0

    def drop(self) -> None:
        """Nothing: who holds a tensor keeps its memory."""
