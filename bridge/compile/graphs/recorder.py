"""Recorder: what a device does for recorded graphs, as an interface; CUDA's is :mod:`bridge.compile.cuda.recorder`.

A recording is a run's launches with all addresses in them; replaying it makes the same launches again, on the current
stream and in its order. Whoever replays sees to it that the addresses mean what they meant.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

__all__ = ["Form", "Memory", "Recorder", "Replay", "Timer", "nbytes"]

Form = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, strides and element type of a dense tensor."""

Replay = Callable[[Sequence[torch.Tensor]], Any]
"""Replays a recording; it is given what the recording was made with, inputs and memory of results in a row, where the
program has inputs on the host, which have no part in addresses; else nothing."""


def nbytes(form: Form) -> int:
    """Bytes of a tensor."""
    shape, _, dtype = form
    return torch.Size(shape).numel() * dtype.itemsize


class Memory(Protocol):
    """Memory that nothing else on the device takes from: what was given back is there again at the next call, at the
    same addresses if the same is asked for. Tensors in it are like any others, to their holders and to the allocator.

    Attributes:
        grown: how often addresses that were given before will not return, because more was asked for.
    """

    grown: int

    def __call__(self, forms: Sequence[Form]) -> list[torch.Tensor]:
        """New tensors on the current stream."""

    @property
    def held_bytes(self) -> int:
        """Bytes that the device has set aside for it."""


class Timer(Protocol):
    """Time of one run, on the host and on the device, taken without waiting for the device.

    Attributes:
        is_disturbed: whether this thread has not had a processor for all of it; known once it has stopped.
    """

    is_disturbed: bool

    def stop(self) -> None:
        """The end of the run."""

    def seconds(self) -> tuple[float, float] | None:
        """The host's and the device's; ``None`` while the device is at work on it."""


class Recorder(Protocol):
    """Recorded graphs of one program on one device."""

    def refusal(self) -> str | None:
        """Why the program cannot be recorded, naming the step; ``None`` if nothing is known against it."""

    @property
    def overlaps(self) -> bool:
        """Whether a replay takes the device less time than the run, for steps run at the same time."""

    def spare_bytes(self, wanted: int) -> int:
        """Bytes of results that recordings may set aside on the device, all others' counted.

        Args:
            wanted: by who asks; it is not spare for those who ask next.
        """

    def elsewhere(self) -> AbstractContextManager | None:
        """What makes the program's device the current one; ``None`` if it is."""

    def is_capturing(self) -> bool:
        """Whether somebody records the current stream into a graph of his own."""

    def stream(self) -> Hashable:
        """The current stream."""

    def memory(self, varies: bool = False, joined: bool = False) -> Memory:
        """New memory for results.

        Args:
            varies: for one, or for several that are let go together, of any size: it begins at the same address
                whatever the size.
            joined: for several that are let go together, of one size.
        """

    def empty(self, form: Form) -> torch.Tensor:
        """A tensor on the current stream, in memory that all share."""

    def timer(self) -> Timer:
        """A timer that begins now."""

    def record(
        self,
        inputs: Sequence[torch.Tensor],
        fresh: Sequence[torch.Tensor],
        copies: Sequence[tuple[int, torch.Tensor]],
    ) -> Replay:
        """Records a run on these inputs with this memory for results, for replays on the current stream.

        Nothing is computed. Intermediates lie in memory that the recordings of a stream share; no tensor is kept.
        Whatever goes wrong is raised, and leaves the device as it was.

        Args:
            inputs: dense or not; copies of those that are not belong to the run.
            fresh: memory of the results in ``layout.fresh``.
            copies: places of other results, with memory that they are written into, or copied to at the end of the run.

        Returns:
            what replays it.
        """
