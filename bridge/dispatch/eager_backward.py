"""Eager backward: a call's inputs, draws and grad_outs → its gradients by torch's operators, which autograd follows.

The traced graph is run again, operator by operator, with the call's own draws, and differentiated by torch. It is
functional and holds every constant of the call: no Python of the module's runs, no buffer changes, no generator moves,
whatever has become of the module since. Gradients of gradients are then eager's own formulas.

Held tensors: a call's inputs and draws that only an eager backward reads → these, unchanged, when it comes.

Autograd does not save them for the compiled backward: a change in place, which is none of its concern, is an error of
the eager one alone. An argument that autograd follows is saved by a node of its own, as autograd saves: hooks on saved
tensors see it, and what it becomes by a change in place keeps no graph alive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import torch

from bridge.base.devices import working_for
from bridge.base.modes import autocast_to
from bridge.base.tensor_properties import as_parts
from bridge.capture import OVERWRITTEN, Captured
from bridge.compile import evaluator
from bridge.dispatch.guards import Sizes
from bridge.dispatch.recompute import RecomputedMasks
from bridge.lowering import LoweredCall
from bridge.reference import needed_nodes, outputs_at
from bridge.rng import mask_at

__all__ = ["VERSION", "EagerBackward", "Held", "changed", "held_apart", "saved_apart", "saved_of", "tensors_of"]

Held = tuple[Sequence[torch.Tensor | None], Sequence[int] | None, torch.Tensor | None]
"""What one call holds: tensors in order, how often each had been changed in place (some number for those that are
``None``), and the result of :class:`_Followed` for these."""

_CHANGED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of shape "
    "{shape}, which {reader} reads, is at version {now}; version {then} is wanted."
)
_EAGER = "eager's backward of a module dispatched to TVM"
_FOLLOWED = "the backward of a module dispatched to TVM under create_graph=True or is_grads_batched=True"
_WRITTEN = (
    "create_graph=True or is_grads_batched=True through a module dispatched to TVM whose forward writes {name} by "
    ".data: remove_tvm_dispatch(module) for that"
)
_UNCOUNTED = (
    "create_graph=True or is_grads_batched=True through a module dispatched to TVM that was called with an inference "
    "tensor, of which torch does not count changes."
)

VERSION: Callable[[torch.Tensor], int] = attrgetter("_version")
"""How often a tensor has been changed in place."""


def changed(tensor: torch.Tensor, then: int, reader: str = _EAGER) -> RuntimeError:
    """Eager's error for a tensor that has been changed in place since it was at this version."""
    return RuntimeError(_CHANGED.format(shape=tuple(tensor.shape), reader=reader, now=tensor._version, then=then))


def saved_of(node: Any) -> Sequence[torch.Tensor]:
    """What the autograd node of a call saved, of the types that it saved, whatever hooks on saved tensors made of them:
    eager's operators take masks and indices of other types, too."""
    saved, types = node.saved_tensors, node.types
    return saved if types is None else [each.to(kind) for each, kind in zip(saved, types, strict=True)]


def tensors_of(held: Held) -> list[torch.Tensor]:
    """The tensors of a call. ``RuntimeError`` if one was changed in place since the call: an element of it."""
    tensors, versions, token = held
    if versions is None:
        raise RuntimeError(_UNCOUNTED)
    followed = iter(() if token is None else token.grad_fn.saved_tensors)
    found = []
    for tensor, then in zip(tensors, versions, strict=True):
        if tensor is not None and tensor._version != then and tensor.numel():
            raise changed(tensor, then, _FOLLOWED)
        found.append(next(followed) if tensor is None else tensor)
    return found


class _Followed(torch.autograd.Function):
    """Saves its inputs. Nothing goes backward through it."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return tensors[0].new_empty(0)


def held_apart(
    tensors: Sequence[torch.Tensor], copied: Sequence[int], followed: Sequence[int]
) -> tuple[list[torch.Tensor | None], list[torch.Tensor], torch.Tensor | None]:
    """What a call holds, where some of the tensors are not held as they are: first and last of :data:`Held`, and
    between them the tensors that tell how often each has been changed.

    Args:
        copied: places of those that the call changes; ``followed``: of those that :class:`_Followed` is for.
    """
    found: list[Any] = list(tensors)
    for place in copied:
        found[place] = tensors[place].clone()
    token = None
    if followed:
        with torch.enable_grad():
            token = _Followed.apply(*[tensors[place] for place in followed])
        for place in followed:
            found[place] = None
    return found, [token if each is None else each for each in found], token


def saved_apart(captured: Captured) -> tuple[set[int], set[int]]:
    """Inputs that are saved in other tensors than the caller's, for what becomes of those until the backward.

    First: not parameters, of which eager saves what it has computed of them: copies. Second: of which eager saves a
    view, which does not follow ``tensor.data = other``.
    """
    observation, owned = captured.observation, captured.module_tensors
    parameters = {index for index, each in enumerate(owned) if each.kind == "parameter"}
    count = len(owned) + len(captured.arguments)
    as_eagers = observation.saved | observation.saved_views | observation.checkpointed.keys() | parameters
    return set(range(count)) - as_eagers, set(range(count)) - observation.saved - observation.checkpointed.keys()


class EagerBackward:
    """Of one lowered call.

    Attributes:
        needed: places of the primals (module tensors, arguments, draws) that its gradients are computed from.
        saved: places of those that autograd saves for the compiled backward, in its order.
        held: those that a call holds for it alone; they come before what is saved of the same. Behind them come those
            that forward overwrites behind autograd's back, once more: what is in them when the backward comes.

    Args:
        masks: that the programs compute: the draw's place holds the generator's state.
    """

    def __init__(self, lowered: LoweredCall, masks: RecomputedMasks):
        self._lowered, self._captured, self._masks = lowered, lowered.captured, masks.forward
        captured, imported = lowered.captured, lowered.imported
        self._given = len(captured.module_tensors) + len(captured.arguments)
        self._draws = (*imported.input_draws, *imported.dropout_draws)
        self.needed = lowered.gradient_inputs
        self.saved = tuple(lowered.plan.saved_primals)
        apart = set().union(*saved_apart(captured)) & {*lowered.wanted}  # autograd cannot follow what is saved of them
        held = [place for place in self.needed if place not in self.saved or place in apart]
        node_of = dict(zip(lowered.imported.output_of, captured.results, strict=True))
        read = needed_nodes(captured, [node_of[output] for output in lowered.differentiable])
        names = {node.args[1] if node.target is OVERWRITTEN else node.name for node in read}
        places = {captured.placeholders.get(name) for name in names}  # none of a batch norm's statistics
        self._overwritten = sorted(captured.observation.overwritten & places)
        self.held = (*dict.fromkeys([*held, *self._overwritten]), *self._overwritten)

    def at(self, sizes: Sizes) -> EagerBackward:
        """The same for certain sizes, where extents are symbolic."""
        captured = self._captured
        draws = evaluator(list(captured.draws), captured.extents)(sizes)
        found = copy(self)
        found._captured = replace(captured, observation=replace(captured.observation, draws=draws))
        return found

    def primals(self, saved: Sequence[torch.Tensor], held: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """All primals in order, ``None`` for those that are not needed, and what is in overwritten ones now.

        Args:
            saved: what autograd saved; the primals come first.
            held: of the places :attr:`held`.
        """
        found: list[torch.Tensor | None] = [None] * (self._given + len(self._draws))
        count = len(self.held) - len(self._overwritten)
        for place, tensor in (*zip(self.saved, saved, strict=False), *zip(self.held[:count], held, strict=False)):
            found[place] = tensor
        return [*found, *held[count:]]

    def __call__(
        self,
        primals: Sequence[torch.Tensor | None],
        outputs: Sequence[int],
        grad_outs: Sequence[torch.Tensor],
        followed: bool,
        cut: Mapping[int, torch.Tensor | None] = MappingProxyType({}),
    ) -> list[torch.Tensor | None]:
        """One gradient per wanted input, ``None`` where eager has none; then one per output that is cut, maybe complex.

        Args:
            primals: from :meth:`primals`.
            outputs: that got a grad_out, and ``grad_outs``: these, batched or not, of complex ones the parts.
            followed: whether autograd is to follow how the gradients are computed.
            cut: outputs that the others are computed from, at which gradients end: as the caller has them, if so.

        Raises:
            RuntimeError: torch's own, where one of its operators has no such derivative.
        """
        lowered, wanted = self._lowered, self._lowered.wanted
        count = self._given + len(self._draws)
        given, now = list(primals[:count]), dict(zip(self._overwritten, primals[count:], strict=True))
        for place in now:
            if place in wanted:
                raise RuntimeError(_WRITTEN.format(name=self._captured.input_name(place)))
        with working_for(self._captured.device), autocast_to(None), torch.enable_grad():  # casts are in the graph
            for place in self._masks:
                if given[place] is not None:
                    given[place] = mask_at(self._captured.draws[self._draws[place - self._given]], given[place])
            for place in wanted:  # a name of its own: one input may be computed from another
                given[place] = given[place].view_as(given[place])
            ends = _Ends()
            cuts = {place: ends.of(known) for place, known in cut.items()}
            results = outputs_at(self._captured, lowered.imported, given, [*outputs, *cut], cuts, now)
            results, reads = [*map(as_parts, results[: len(outputs)])], results[len(outputs) :]
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
