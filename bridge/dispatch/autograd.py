"""The ``torch.autograd.Function`` of a compiled call: primals → outputs; grad_outs → gradients of the wanted inputs.

Saved inputs, outputs and intermediates all go through ``save_for_backward``, so that ``saved_tensors_hooks`` see them
and in-place changes are detected. The node releases them as the backward starts, unless the graph is retained, and the
program drops each one after its last use.

Second derivatives: autograd cannot differentiate the compiled backward, which computes values for one set of grad_outs.
Under ``create_graph=True`` and ``is_grads_batched=True``, eager's operators compute the node's gradients
(:class:`bridge.dispatch.eager_backward.EagerBackward`), counted by reason; any further derivative is torch's own graph.

A backward in segments has several autograd nodes. The call's own node runs first: it runs the first segment, returns
the gradients that are complete then, and hands a *token* to the next node: a gradient without elements that owns the
segmented run. Autograd runs the nodes in this order, and consumers of their gradients in between. If autograd skips the
later nodes (``torch.autograd.grad`` for some inputs), the run is freed with the token; a retained graph begins a new
run each time. The first node saves all tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import is_autocast_enabled, is_grad_enabled

from bridge.base.torch_autograd import applied, keeps_graph
from bridge.base.torch_internals import has_storage, len_function_stack, no_torch_function, saved_tensors_hooks
from bridge.dispatch.backward_nodes import make_token, run_of_token
from bridge.dispatch.call_run import CallValues, outside_autocast
from bridge.dispatch.eager_backward import changed, saved_of, tensors_of

__all__ = ["BATCHED", "FOLLOWED", "apply", "apply_in_nodes", "eager_gradients"]

FOLLOWED = "backward with create_graph=True: computed by eager's operators"
BATCHED = "backward of batched gradients (is_grads_batched=True): computed by eager's operators"

_LOADED = (
    "{what} through a module of load_compiled: its backward is compiled and cannot be differentiated or batched, and "
    "what it was compiled from is not in the folder. Dispatch the module itself with add_tvm_dispatch."
)
_FREED = (
    "Trying to backward through the graph a second time (or directly access saved tensors after they have already been "
    "freed), in a module dispatched to TVM. Specify retain_graph=True in the first backward."
)


def eager_gradients(ctx: Any, outputs: Sequence[int], grad_outs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Gradients of the call's own autograd node by eager's operators, plus the next node's token if there are several.

    Args:
        ctx: the context of the call's node.
        outputs: places of the outputs that got a grad_out.
        grad_outs: their gradients.

    Raises:
        RuntimeError: the graph was freed, an input was changed in place, an operator has no second derivative (as in
            eager), or there is no traced graph.
    """
    programs, followed = ctx.programs, torch.is_grad_enabled()
    reason = FOLLOWED if followed else BATCHED
    if programs.eager_backward is None:
        what = "create_graph=True" if followed else "batched gradients (is_grads_batched=True)"
        raise RuntimeError(_LOADED.format(what=what))
    backward = programs.eager_backward
    saved = saved_of(ctx)
    if backward.held and ctx.held is None:
        raise RuntimeError(_FREED)
    with no_torch_function() if len_function_stack() else nullcontext():
        primals = backward.primals(saved, tensors_of(ctx.held) if backward.held else ())
        gradients = backward(primals, outputs, grad_outs, followed)
        programs.eager_backwards[reason] += 1
        if len(programs.nodes) == 1:
            return gradients
        given = [[gradients[place] for place in node] for node in programs.nodes]
        return [*given[0], make_token(programs.device, given.__getitem__)]


class _Dispatched(torch.autograd.Function):
    """Forward and backward of a call. Inputs: the call, inputs that get a gradient.

    If the backward has several nodes, this one runs first; its last input is the token of the next (:class:`_Later`).
    """

    @staticmethod
    def forward(ctx, call: CallValues, *wanted: torch.Tensor):
        run = call.run
        for act in run.forward:
            act(call)
        programs, values = run.programs, call.values
        ctx.to_save, ctx.materialize_grads = tuple(call.saved), False  # as save_for_backward and the other setter do
        if saved_tensors_hooks() is not None:
            ctx.types = [each.dtype for each in call.saved]
        if call.held is not None:
            ctx.held = call.held
        if call.watched is not None:
            ctx.watched = call.watched
        if call.beside is not None:
            ctx.beside = call.beside
        if call.later is not None:
            ctx.later = call.later
        call.values = call.saved = call.held = call.watched = None  # autograd's from here on
        ctx.programs = programs
        if programs.not_differentiable:
            ctx.mark_non_differentiable(*[values[i] for i in programs.not_differentiable])
        return tuple(values[: programs.num_outputs])

    @staticmethod
    def backward(ctx, *grad_outs: torch.Tensor | None):
        programs = ctx.programs
        if ctx.later is not None:
            ctx.later()
        present, is_eagers = [], is_grad_enabled()
        for i in programs.differentiable:
            if grad_outs[i] is not None:
                present.append(i)
                is_eagers = is_eagers or not has_storage(grad_outs[i])
        if not present:
            return _with_beside(ctx, [None] * (len(ctx.needs_input_grad) - 1))
        if is_eagers:
            gradients = eager_gradients(ctx, present, [grad_outs[i] for i in present])
            ctx.maybe_clear_saved_tensors()
            if not keeps_graph():
                ctx.held = ctx.watched = None
            return _with_beside(ctx, gradients)
        inputs = list(saved_of(ctx))
        if ctx.watched is not None:
            for tensor, then in zip(*ctx.watched, strict=True):
                if tensor._version != then:
                    raise changed(tensor, then)
        ctx.maybe_clear_saved_tensors()
        if not keeps_graph():
            ctx.held = ctx.watched = None
        for i in present:
            inputs.append(grad_outs[i])
        del grad_outs
        backward = programs.backward_for(tuple(present))
        run = backward.begin if len(programs.nodes) > 1 else backward.__call__
        if is_autocast_enabled(programs.device_type):
            run = partial(outside_autocast, programs.device_type, run)
        if not len_function_stack():
            return (None, *run(inputs)) if ctx.beside is None else _with_beside(ctx, run(inputs))
        with no_torch_function():  # a mode of the user's, or a default device
            return _with_beside(ctx, run(inputs))


def _with_beside(ctx: Any, gradients: Sequence[torch.Tensor | None], node: int = 0) -> tuple[torch.Tensor | None, ...]:
    """A node's gradients plus the gradients that nodes of chained results have computed, after its call's ``None``."""
    if ctx.beside is not None and not ctx.beside.is_empty:
        gradients = ctx.beside.taken(gradients, ctx.programs.nodes[node])
    return (None, *gradients)


apply = applied(_Dispatched, types=None, held=None, watched=None, beside=None, later=None)


class _Later(torch.autograd.Function):
    """A later node. Inputs: the call with the node's number, inputs that get a gradient, the next node's token."""

    @staticmethod
    def forward(ctx, given: tuple[CallValues, int], *wanted: torch.Tensor):
        call, ctx.node = given
        ctx.programs, ctx.beside = call.run.programs, call.beside
        ctx.set_materialize_grads(False)
        with no_torch_function() if len_function_stack() else nullcontext():
            return make_token(ctx.programs.device)

    @staticmethod
    def backward(ctx, token: torch.Tensor | None):
        programs, node = ctx.programs, ctx.node
        if token is None:  # the call's own node got no gradient
            return (None,) * len(ctx.needs_input_grad)
        run, device = run_of_token(token), programs.device_type
        with no_torch_function() if len_function_stack() else nullcontext():
            gradients = outside_autocast(device, run, node) if torch.is_autocast_enabled(device) else run(node)
        return (*_with_beside(ctx, gradients, node), *[token] * (node < len(programs.nodes) - 1))


_later = applied(_Later)


def apply_in_nodes(call: CallValues, *wanted: torch.Tensor):
    """:data:`apply` with one autograd node for each of ``programs.nodes``."""
    nodes = call.run.programs.nodes
    token: tuple[torch.Tensor, ...] = ()
    for node in range(len(nodes) - 1, 0, -1):
        token = (_later((call, node), *[wanted[place] for place in nodes[node]], *token),)
    return apply(call, *[wanted[place] for place in nodes[0]], *token)
