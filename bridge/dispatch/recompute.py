"""Pre-call guard expressions: a call's inputs → data-dependent sizes; a failure if a number that forward reads differs.

The expressions are torch operators, run without autograd and autocast (its casts are in the graph), in the order in
which forward reads the numbers. The first number that differs ends the evaluation: eager may take another branch there
and never read the rest.

:class:`RecomputedMasks`: a lowered call and its backend → the dropout masks that the kernels recompute.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from bridge.base.devices import HOST
from bridge.base.errors import RUN, GuardFailure, is_final
from bridge.capture import Draw, Output, PreCallExpression, shown, sized
from bridge.compile import Backend, DrawnMask
from bridge.lowering import LoweredCall
from bridge.rng import alignment_of, checked_gpu, recomputed_mask

Read = Callable[[list[torch.Tensor]], list[torch.Tensor]]


def numbers_read(read: Sequence[PreCallExpression], device: torch.device) -> Read:
    """Expressions → a function: a call's inputs → the inputs, and a tensor for each data-dependent size.

    The function raises :class:`GuardFailure` for a number, not a size, that differs from the compiled one.
    """
    _ = [each.compute for each in read]  # made now
    is_host, counts = device.type == HOST.type, any(each.sizes for each in read)

    def check(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        if not is_host and torch.cuda.is_current_stream_capturing():
            raise GuardFailure(RUN, read[0].field, "cannot be read while the stream is being captured")
        found = list(inputs) if counts else inputs
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            for each in read:
                now = _computed(each, found)
                if now != each.numbers and not _fits(each, now):
                    raise GuardFailure(RUN, each.field, f"{each.words}, called with {shown(now)}")
                found += [sized(n, device) for n, size in zip(now, each.sizes, strict=False) if size is not None]
        return found

    return check


def _fits(each: PreCallExpression, now: tuple[int, ...]) -> bool:
    """Whether all numbers equal the compiled ones, except dynamic sizes."""
    if len(now) != len(each.sizes):
        return False
    pairs = zip(now, each.numbers, each.sizes, strict=True)
    return all(number == then if size is None else number >= 0 for number, then, size in pairs)


def _computed(each: PreCallExpression, inputs: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """The current numbers. If an operator raises, eager raises as well."""
    try:
        return tuple(each.compute(*[inputs[index] for index in each.inputs]).reshape(-1).tolist())
    except Exception as error:
        if is_final(error):
            raise
        failure = GuardFailure(RUN, f"error in the {each.field}", f"{type(error).__name__}: {error}")
        raise failure from error


@dataclass(frozen=True)
class Observed:
    """Eager's draws and results: with symbolic extents, or for given sizes (:func:`bridge.compile.evaluator`)."""

    draws: tuple[Draw, ...]
    outputs: tuple[Output, ...]


class RecomputedMasks:
    """The dropout masks of one lowered call that its programs recompute from the generator's state, which is saved.

    Args:
        addresses: place → address of the sample's inputs of fused dropouts; without an address, the mask is saved.

    Attributes:
        draws: indices of their draws among the observed draws.
        forward: place among the forward's parameters → how eager draws the mask.
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
            mask = recomputed_mask(draw, gpu) if is_here else None
            if mask is not None:
                self.draws.append(index)
                self.forward[place] = mask

    @property
    def backward(self) -> dict[int, DrawnMask]:
        """Place among a backward's parameters → how eager draws the mask."""
        return {place: self.forward[primal] for place, primal in enumerate(self._saved) if primal in self.forward}


def _lies_well(draw: Draw, addresses: Mapping[int, int]) -> bool:
    """Whether a fused dropout's input, if it has one, has the alignment that :func:`recomputed_mask` assumes."""
    of = None if draw.operand is None else draw.operand.of
    return of is None or (of in addresses and addresses[of] % alignment_of(draw) == 0)


def alignments(draws: Sequence[Draw], computed: Collection[int]) -> dict[int, int]:
    """Place of an input → the alignment in bytes at which recomputed masks equal eager's.

    Args:
        draws: a call's draws.
        computed: indices of the recomputed masks.
    """
    found: dict[int, int] = {}
    for draw in (draws[index] for index in computed):
        of = None if draw.operand is None else draw.operand.of
        if of is not None:
            found[of] = max(found.get(of, 1), alignment_of(draw))
    return {of: least for of, least in found.items() if least > 1}
