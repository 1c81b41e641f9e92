"""Eager backward: a call's inputs, draws and grad_outs → its gradients by torch's operators, differentiable.

The traced graph runs again, operator by operator, with the call's own draws, and torch differentiates it. It is
functional and holds every constant of the call: no Python of the module runs, no buffer changes, no generator advances,
and later changes of the module have no effect. Gradients of gradients are then eager's own formulas.

Held tensors: inputs and draws that only an eager backward reads. They are not saved for the compiled backward, since an
in-place change of one is an error of the eager backward only. An argument that requires grad is saved by an autograd
node of its own: hooks on saved tensors see it, and a later in-place change of it keeps no graph alive.
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
from bridge.base.torch_autograd import applied
from bridge.base.torch_internals import VF, set_grad_enabled
from bridge.capture import OVERWRITTEN, Captured
from bridge.compile import evaluator
from bridge.dispatch.guards import Sizes
from bridge.dispatch.recompute import RecomputedMasks
from bridge.lowering import LoweredCall
from bridge.reference import needed_nodes, outputs_at
from bridge.rng import mask_at

__all__ = ["VERSION", "EagerBackward", "Held", "changed", "held_apart", "saved_apart", "saved_of", "tensors_of"]

Held = tuple[Sequence[torch.Tensor | None], Sequence[int] | None, torch.Tensor | None]
"""The tensors that one call holds, in order; their version counts (any number for ``None``); and the result of
:class:`_Followed`, which saved the tensors that are ``None`` here."""

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
"""A tensor's version count: the number of its in-place changes."""


def changed(tensor: torch.Tensor, then: int, reader: str = _EAGER) -> RuntimeError:
    """Eager's error for a tensor that was changed in place since version ``then``."""
    return RuntimeError(_CHANGED.format(shape=tuple(tensor.shape), reader=reader, now=tensor._version, then=then))


def saved_of(node: Any) -> Sequence[torch.Tensor]:
    """The saved tensors of a call's autograd node, cast back to their dtypes if hooks on saved tensors changed them:
    eager's operators would accept masks and indices of other dtypes without an error."""
    saved, types = node.saved_tensors, node.types
    return saved if types is None else [each.to(kind) for each, kind in zip(saved, types, strict=True)]


def tensors_of(held: Held) -> list[torch.Tensor]:
    """The held tensors of a call. ``RuntimeError`` if a non-empty one was changed in place since the call."""
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
    """Saves its inputs; its backward never runs."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.to_save = tensors
        return tensors[0].new_empty(0)


_follow = applied(_Followed)


def held_apart(
    tensors: Sequence[torch.Tensor], copied: Sequence[int], followed: Sequence[int]
) -> tuple[list[torch.Tensor | None], list[torch.Tensor], torch.Tensor | None]:
    """A call's held tensors, some copied or saved by autograd → the tensors and the token of :data:`Held`, and between
    them the tensors whose version counts are to be recorded.

    Args:
        copied: places of tensors that the call changes; ``followed``: of tensors that :class:`_Followed` saves.
    """
    found: list[Any] = list(tensors)
    for place in copied:
        found[place] = tensors[place].clone()
    token = None
    if followed:
        before = torch.is_grad_enabled()
        set_grad_enabled(True)  # a context of torch.enable_grad takes ten times as long
        try:
            token = _follow(*[tensors[place] for place in followed])
        finally:
            set_grad_enabled(before)
        for place in followed:
            found[place] = None
    return found, [token if each is None else each for each in found], token


def saved_apart(captured: Captured) -> tuple[set[int], set[int]]:
    """Inputs that must not be saved as the caller's tensor objects, which may change before the backward.

    First: to be copied, since eager saves only values computed from them; never parameters. Second: to be saved
    detached, since eager saves a view of them, which does not follow ``tensor.data = other``.
    """
    observation, owned = captured.observation, captured.module_tensors
    parameters = {index for index, each in enumerate(owned) if each.kind == "parameter"}
    count = len(owned) + len(captured.given.tensors)
    as_eagers = observation.saved | observation.saved_views | observation.checkpointed.keys() | parameters
    return set(range(count)) - as_eagers, set(range(count)) - observation.saved - observation.checkpointed.keys()


class EagerBackward:
    """The differentiable backward of one lowered call.

    Attributes:
        needed: places of the primals (module tensors, arguments, draws) that its gradients depend on.
        saved: places of the primals that autograd saves for the compiled backward, in its order.
        held: places of the primals that a call holds for this backward alone; they take precedence over ``saved``. Then
            again the inputs that forward overwrites unseen by autograd, for their values at the time of the backward.

    Args:
        masks: the recomputed dropout masks: at their places, the primal is the generator's state.
    """

    def __init__(self, lowered: LoweredCall, masks: RecomputedMasks):
        self._lowered, self._captured, self._masks = lowered, lowered.captured, masks.forward
        captured, imported = lowered.captured, lowered.imported
        self._given = len(captured.module_tensors) + len(captured.given.tensors)
        self._draws = (*imported.input_draws, *imported.dropout_draws)
        self.needed = lowered.gradient_inputs
        self.saved = tuple(lowered.plan.saved_primals)
        apart = set().union(*saved_apart(captured)) & {*lowered.wanted}  # their saved copies are detached
        held = [place for place in self.needed if place not in self.saved or place in apart]
        node_of = dict(zip(lowered.imported.output_of, captured.results, strict=True))
        read = needed_nodes(captured, [node_of[output] for output in lowered.differentiable])
        names = {node.args[1] if node.target is OVERWRITTEN else node.name for node in read}
        places = {captured.names.placeholders.get(name) for name in names}  # none of a batch norm's statistics
        self._overwritten = sorted(captured.observation.overwritten & places)
        self.held = (*dict.fromkeys([*held, *self._overwritten]), *self._overwritten)

    def at(self, sizes: Sizes) -> EagerBackward:
        """The backward for given sizes of the symbolic extents."""
        captured = self._captured
        draws = evaluator(list(captured.draws), captured.sizes.scope)(sizes)
        found = copy(self)
        found._captured = replace(captured, observation=replace(captured.observation, draws=draws))
        return found

    def primals(self, saved: Sequence[torch.Tensor], held: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """All primals in order, ``None`` for unneeded ones, then the current values of overwritten inputs.

        Args:
            saved: the tensors that autograd saved; the primals come first.
            held: the tensors at the places :attr:`held`.
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
        """One gradient per wanted input, ``None`` where eager has none; then one per cut output, possibly complex.

        Args:
            primals: from :meth:`primals`.
            outputs: places of the outputs that got a grad_out.
            grad_outs: their gradients, batched or not; real pairs for complex ones.
            followed: whether to record the computation of the gradients (``create_graph``).
            cut: places of outputs that other outputs are computed from, at which gradients end, with the caller's
                tensor if it still exists unchanged.

        Raises:
            RuntimeError: torch's own, if one of its operators lacks the derivative.
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
            place: VF.zeros_like(given[place]) if gradient is None and not cut else gradient
            for place, gradient in zip(reached, found, strict=False)
        }
        return [*(gradients.get(place) for place in wanted), *found[len(reached) :]]


class _Ends:
    """Values at which the first gradients end; ``pass_on``: whether gradients of gradients pass through."""

    def __init__(self) -> None:
        self.pass_on = False

    def of(self, known: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
        """A function that ends gradients at its argument; its result is ``known`` instead, if given."""
        return lambda value: _End.apply(self, value if known is None else known)


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ends: _Ends, value: torch.Tensor) -> torch.Tensor:
        ctx.ends = ends
        return value.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor | None]:
        return None, grad if ctx.ends.pass_on else None
