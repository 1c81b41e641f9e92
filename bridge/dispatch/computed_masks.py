"""Computed masks: a lowered call and its backend → the dropout masks that its kernels compute, and where they enter."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial

from bridge.capture import Draw
from bridge.compile import Backend, DrawnMask
from bridge.lowering import LoweredCall
from bridge.rng import alignment_of, checked_gpu, computed_mask

__all__ = ["ComputedMasks", "alignments"]


class ComputedMasks:
    """The masks of one lowered call that its programs compute; the generator's state is their input, and is saved.

    Args:
        addresses: where the inputs that dropouts read lay in the sample, by place; of another one the mask is stored.

    Attributes:
        draws: indices of the observed draws that they are.
        forward: how eager draws each, by place among the forward's parameters.
    """

    def __init__(self, lowered: LoweredCall, backend: Backend, addresses: Mapping[int, int] | None = None):
        captured, imported = lowered.captured, lowered.imported
        used = (*imported.input_draws, *imported.dropout_draws)
        inputs = lowered.num_primals - len(used)
        gpu = partial(checked_gpu, backend.device)
        self.forward: dict[int, DrawnMask] = {}
        self.draws: list[int] = []
        self._saved = [] if lowered.plan is None else list(lowered.plan.saved_primals)
        for place, index in enumerate(used, inputs):
            draw = captured.draws[index]
            is_here = draw.device == backend.device and _lies_well(draw, addresses or {})
            mask = computed_mask(draw, gpu) if is_here else None
            if mask is not None:
                self.draws.append(index)
                self.forward[place] = mask

    @property
    def backward(self) -> dict[int, DrawnMask]:
        """How eager draws each, by place among a backward's parameters."""
        return {place: self.forward[primal] for place, primal in enumerate(self._saved) if primal in self.forward}


def _lies_well(draw: Draw, addresses: Mapping[int, int]) -> bool:
    """Whether a fused dropout's input, if it reads one's memory, lies as :func:`computed_mask` takes it to lie."""
    of = None if draw.operand is None else draw.operand.of
    return of is None or (of in addresses and addresses[of] % alignment_of(draw) == 0)


def alignments(draws: Sequence[Draw], computed: Collection[int]) -> dict[int, int]:
    """Bytes at multiples of which inputs have to begin for computed masks to be eager's, by place.

    Args:
        draws: what a call draws.
        computed: indices of the masks that its programs compute.
    """
    found: dict[int, int] = {}
    for draw in (draws[index] for index in computed):
        of = None if draw.operand is None else draw.operand.of
        if of is not None:
            found[of] = max(found.get(of, 1), alignment_of(draw))
    return {of: least for of, least in found.items() if least > 1}
