"""Eager backward: a call's inputs, draws and grad_outs → its gradients by torch's operators, which autograd follows.

The traced graph is run again, operator by operator, with the call's own draws, and differentiated by torch. It is
functional and holds every constant of the call: no Python of the module's runs, no buffer changes, no generator moves,
whatever has become of the module since. Gradients of gradients are then eager's own formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from bridge.base.devices import working_for
from bridge.base.modes import autocast_to
from bridge.dispatch.computed_masks import ComputedMasks
from bridge.dispatch.guards import Sizes
from bridge.dispatch.held import saved_apart
from bridge.dispatch.observed import Observed, observed_for
from bridge.lowering import LoweredCall
from bridge.reference import outputs_at
from bridge.rng import mask_at

__all__ = ["EagerBackward"]


class EagerBackward:
    """Of one lowered call.

    Attributes:
        needed: places of the primals (module tensors, arguments, draws) that its gradients are computed from.
        saved: places of those that autograd saves for the compiled backward, in its order.
        held: those that a call holds for it alone; they come before what is saved of the same.

    Args:
        masks: that the programs compute: the draw's place holds the generator's state.
    """

    def __init__(self, lowered: LoweredCall, masks: ComputedMasks):
        self._lowered, self._captured, self._masks = lowered, lowered.captured, masks.forward
        captured, imported = lowered.captured, lowered.imported
        self._given = len(captured.module_tensors) + len(captured.arguments)
        self._draws = (*imported.input_draws, *imported.dropout_draws)
        self.needed = lowered.gradient_inputs
        self.saved = tuple(lowered.plan.saved_primals)
        apart = set().union(*saved_apart(captured)) & {*lowered.wanted}  # autograd cannot follow what is saved of them
        self.held = tuple(place for place in self.needed if place not in self.saved or place in apart)

    def at(self, sizes: Sizes) -> EagerBackward:
        """The same for certain sizes, where extents are symbolic."""
        captured = self._captured
        observed = observed_for(Observed(tuple(captured.draws), ()), captured.extents)(sizes)
        found = copy(self)
        found._captured = replace(captured, observation=replace(captured.observation, draws=list(observed.draws)))
        return found

    def primals(self, saved: Sequence[torch.Tensor], held: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """All primals in order, ``None`` for those that are not needed.

        Args:
            saved: what autograd saved; the primals come first.
            held: of the places :attr:`held`.
        """
        found: list[torch.Tensor | None] = [None] * (self._given + len(self._draws))
        for place, tensor in (*zip(self.saved, saved, strict=False), *zip(self.held, held, strict=True)):
            found[place] = tensor
        return found

    def __call__(
        self,
        primals: Sequence[torch.Tensor | None],
        outputs: Sequence[int],
        grad_outs: Sequence[torch.Tensor],
        followed: bool,
        cut: Mapping[int, torch.Tensor | None] = MappingProxyType({}),
    ) -> list[torch.Tensor | None]:
        """One gradient per wanted input, ``None`` where eager has none; then one per output that is cut.

        Args:
            primals: from :meth:`primals`.
            outputs: that got a grad_out, and ``grad_outs``: these, batched or not.
            followed: whether autograd is to follow how the gradients are computed.
            cut: outputs that the others are computed from, at which gradients end: as the caller has them, if so.

        Raises:
            RuntimeError: torch's own, where one of its operators has no such derivative.
        """
        lowered, wanted = self._lowered, self._lowered.wanted
        given = list(primals)
        with working_for(self._captured.device), autocast_to(None), torch.enable_grad():  # casts are in the graph
            for place in self._masks:
                if given[place] is not None:
                    given[place] = mask_at(self._captured.draws[self._draws[place - self._given]], given[place])
            for place in wanted:  # a name of its own: one input may be computed from another
                given[place] = given[place].view_as(given[place])
            ends = _Ends()
            cuts = {place: ends.of(known) for place, known in cut.items()}
            results = outputs_at(self._captured, lowered.imported, given, [*outputs, *cut], cuts)
            results, reads = results[: len(outputs)], results[len(outputs) :]
            pairs = [(each, grad) for each, grad in zip(results, grad_outs, strict=True) if each.requires_grad]
            reached = lowered.gradients_for(outputs)
            found = torch.autograd.grad(
                [each for each, _ in pairs],
                [*(given[place] for place in reached), *reads],
                [grad for _, grad in pairs],
                create_graph=followed,
                allow_unused=True,
            )
            ends.pass_on = True
        gradients = {
            place: torch.zeros_like(given[place]) if gradient is None and not cut else gradient
            for place, gradient in zip(reached, found, strict=False)
        }
        return [*(gradients.get(place) for place in wanted), *found[len(reached) :]]


class _Ends:
    """Ends of gradients: values that pass none on for now, and do later, where gradients are differentiated."""

    def __init__(self) -> None:
        self.pass_on = False

    def of(self, known: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
        """What ends at a value; ``known``: the very tensor that it is, if there is one."""
        return lambda value: _End.apply(self, value if known is None else known)


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ends: _Ends, value: torch.Tensor) -> torch.Tensor:
        ctx.ends = ends
        return value.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor | None]:
        return None, grad if ctx.ends.pass_on else None
