"""Functions in checkpoints → what eager's second run of them, in the backward, would compute otherwise than the first.

A compiled call runs a checkpointed function once; what is computed again in the backward is the partition's choice, and
has the first run's numbers. Eager runs Python again: it counts and updates running statistics a second time, reads what
has been written since, and draws anew where ``preserve_rng_state=False``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from bridge.base.checkpoint_frames import checkpoint_frame, is_computed_again, puts_generators_back
from bridge.base.errors import Unsupported, user_line
from bridge.base.threads import stack_of
from bridge.base.torch_internals import storage_id

__all__ = ["DRAWS_ANEW", "CheckpointedReads", "draws_anew", "written_and_read"]

_HINT = "dispatch what is checkpointed, or leave the checkpoint out: partition='recompute_all' saves as little"
DRAWS_ANEW = "draws in a checkpoint with preserve_rng_state=False, which draws other numbers when it runs again"


def draws_anew() -> bool:
    """Whether what is drawn now is drawn again in the backward, with other numbers."""
    frame = checkpoint_frame()
    return frame is not None and not puts_generators_back(frame)


class CheckpointedReads:
    """Which of a call's inputs are read, and where, by functions in checkpoints that the backward runs again."""

    def __init__(self, thread: int):
        self._thread = thread
        self._frames: dict[int, Any] = {}
        self._lines: dict[int, dict[int, str]] = {}

    def note(self, tensors: Iterable[torch.Tensor]) -> None:
        """A function of torch's has these arguments."""
        frame = checkpoint_frame()
        if frame is None:
            return
        lines = self._lines.setdefault(id(frame), {})
        self._frames[id(frame)] = frame
        for tensor in tensors:
            if storage_id(tensor) not in lines:
                lines[storage_id(tensor)] = user_line(stack_of(self._thread)) or "forward"

    def of(self, inputs: Sequence[torch.Tensor]) -> dict[int, str]:
        """Index of each input that is read → the user's line that reads it first."""
        found: dict[int, str] = {}
        for key, frame in self._frames.items():
            if is_computed_again(frame):
                for index, tensor in enumerate(inputs):
                    if (line := self._lines[key].get(storage_id(tensor))) is not None:
                        found.setdefault(index, line)
        return found


def written_and_read(read: dict[int, str], written: Iterable[int], names: Sequence[str]) -> list[Unsupported]:
    """What :class:`CheckpointedReads` found of inputs that forward writes; ``names``: the module's tensors."""
    reason = "is written by forward, and a checkpoint reads it: eager's backward runs that again, after the write"
    return [
        Unsupported(f"buffer '{names[index]}'" if index < len(names) else "an argument", read[index], reason, _HINT)
        for index in sorted(set(written) & read.keys())
    ]
