"""Segmented run: a backward's segments, saved tensors and grad_outs → one segment's gradients at a time.

What later segments need is held here and nowhere else, and let go of after its last use, so memory falls while the
backward goes on, and a backward that ends early leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from bridge.compile import Segment

__all__ = ["BoundSegment", "SegmentedRun", "make_token", "run_of_token"]

Execute = Callable[..., list[torch.Tensor]]
BoundSegment = tuple[Segment, Execute | None]
"""A segment, and what runs its program."""

_CHANGED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation, while the backward"
    " of a module dispatched to TVM was on its way: {tensor} is at version {now}, version {then} is wanted. Something"
    " that runs in the backward, as hooks do, has changed it."
)

_REPLACED = (
    "the gradient between two autograd nodes of a module dispatched to TVM was replaced: hooks on autograd nodes have "
    "to leave gradients without elements as they are. Let them, or call remove_tvm_dispatch(module) first."
)


class SegmentedRun:
    """One pass through the segments of a backward. Each may be run once, in order.

    Args:
        segments: bound.
        taken: of each segment, the places of the gradients that are handed out after it, ``None`` for one that eager
            has not.
        copied: places of gradients in memory that others can see.
        inputs: saved tensors and grad_outs; emptied.
    """

    __slots__ = ("_copied", "_next", "_ready", "_segments", "_slots", "_taken", "_versions")

    def __init__(
        self,
        segments: Sequence[BoundSegment],
        taken: Sequence[Sequence[int | None]],
        copied: Collection[int],
        inputs: list[torch.Tensor],
    ):
        self._segments, self._taken, self._copied, self._next = segments, taken, copied, 0
        self._slots = dict(enumerate(inputs))
        inputs.clear()
        later = {slot for segment, _ in segments[1:] for slot, _ in segment.takes}
        self._versions = {slot: each._version for slot, each in self._slots.items() if slot in later and _counts(each)}
        self._ready: dict[int, torch.Tensor] = {}

    def __call__(self, index: int) -> list[torch.Tensor | None]:
        """Runs a segment; returns the gradients that are handed out after it.

        Raises:
            RuntimeError: not the next one; or an input of it was changed in place since the first one ran.
        """
        if index != self._next:
            raise RuntimeError(f"segment {index} of a dispatched module's backward was run after {self._next} others")
        self._next += 1
        segment, execute = self._segments[index]
        slots = self._slots
        inputs = []
        for slot, is_last in segment.takes:
            tensor = slots.pop(slot) if is_last else slots[slot]
            if index and slot in self._versions and tensor._version != self._versions[slot]:
                told = f"a tensor of shape {tuple(tensor.shape)}"
                raise RuntimeError(_CHANGED.format(tensor=told, now=tensor._version, then=self._versions[slot]))
            inputs.append(tensor)
        if execute is not None:
            tensor = None  # the program lets go of its inputs
            slots.update(zip(segment.gives, execute(inputs, consume=True), strict=True))
        for place, slot in segment.results:
            self._ready[place] = slots[slot].clone() if place in self._copied else slots[slot]
        for _, slot in segment.results:
            slots.pop(slot, None)
        return [None if place is None else self._ready.pop(place) for place in self._taken[index]]


def _counts(tensor: torch.Tensor) -> bool:
    """Whether changes in place are counted."""
    return not tensor.is_inference()


def make_token(device: torch.device, run: SegmentedRun | None = None) -> torch.Tensor:
    """A tensor without elements that one autograd node hands to the next, with the pass that goes on there."""
    token = torch.empty(0, dtype=torch.float32, device=device)  # autograd casts one of another type than the output's
    token.run = run
    return token


def run_of_token(token: torch.Tensor) -> SegmentedRun:
    """The pass that a token came with. ``RuntimeError`` if it is another tensor by now."""
    run = getattr(token, "run", None)
    if run is None:
        raise RuntimeError(_REPLACED)
    return run
