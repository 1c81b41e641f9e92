"""Computed masks: a lowered call and its backend → the dropout masks that its kernels compute, and where they enter."""

from __future__ import annotations

from functools import partial

from bridge.compile import Backend, DrawnMask
from bridge.lowering import LoweredCall
from bridge.rng import checked_gpu, computed_mask

__all__ = ["ComputedMasks"]


class ComputedMasks:
    """The masks of one lowered call that its programs compute; the generator's state is their input, and is saved.

    Attributes:
        draws: indices of the observed draws that they are.
        forward: how eager draws each, by place among the forward's parameters.
    """

    def __init__(self, lowered: LoweredCall, backend: Backend):
        captured, imported = lowered.captured, lowered.imported
        used = (*imported.input_draws, *imported.dropout_draws)
        inputs = lowered.num_primals - len(used)
        gpu = partial(checked_gpu, backend.device)
        self.forward: dict[int, DrawnMask] = {}
        self.draws: list[int] = []
        self._saved = [] if lowered.plan is None else list(lowered.plan.saved_primals)
        for place, index in enumerate(used, inputs):
            draw = captured.draws[index]
            mask = computed_mask(draw, gpu) if draw.device == backend.device else None
            if mask is not None:
                self.draws.append(index)
                self.forward[place] = mask

    @property
    def backward(self) -> dict[int, DrawnMask]:
        """How eager draws each, by place among a backward's parameters."""
        return {place: self.forward[primal] for place, primal in enumerate(self._saved) if primal in self.forward}
