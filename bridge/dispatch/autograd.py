"""The ``torch.autograd.Function`` of a compiled call: primals → outputs; grad_outs → gradients of the wanted inputs.

What the backward reads goes through ``save_for_backward``: inputs, outputs and captures alike, so that
``saved_tensors_hooks`` see them and in-place changes are noticed. The node releases them as the backward starts,
unless the graph is retained, and the program drops each one after its last use. Gradients that are differentiated
again, or batched, are eager's operators' (:mod:`bridge.dispatch.second_derivatives`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from bridge.base.torch_autograd import keeps_graph
from bridge.base.torch_internals import has_storage, len_function_stack, no_torch_function, saved_tensors_hooks
from bridge.dispatch.call_run import Action, CallValues, outside_autocast
from bridge.dispatch.held import saved_of
from bridge.dispatch.programs import BoundPrograms, Programs
from bridge.dispatch.second_derivatives import eager_gradients

__all__ = ["applied", "apply"]


class _Dispatched(torch.autograd.Function):
    """Forward and backward of a call. Inputs: programs, what the forward does, the call, inputs that get a gradient.

    Where the backward has several nodes this is the first to run, and its last input is the next one's token
    (:mod:`bridge.dispatch.autograd_nodes`).
    """

    @staticmethod
    def forward(
        ctx, programs: Programs | BoundPrograms, actions: list[Action], call: CallValues, *wanted: torch.Tensor
    ):
        for act in actions:
            act(call)
        values = call.values
        ctx.save_for_backward(*call.saved)
        ctx.types = [each.dtype for each in call.saved] if saved_tensors_hooks() is not None else None
        ctx.held, ctx.beside, ctx.later = call.held, call.beside, call.later
        call.values = call.saved = call.held = None  # autograd's from here on
        ctx.programs = programs
        ctx.set_materialize_grads(False)
        if programs.not_differentiable:
            ctx.mark_non_differentiable(*[values[i] for i in programs.not_differentiable])
        return tuple(values[: programs.num_outputs])

    @staticmethod
    def backward(ctx, *grad_outs: torch.Tensor | None):
        programs = ctx.programs
        if ctx.later is not None:
            ctx.later()
        present, is_eagers = [], torch.is_grad_enabled()
        for i in programs.differentiable:
            if grad_outs[i] is not None:
                present.append(i)
                is_eagers = is_eagers or not has_storage(grad_outs[i])
        if not present:
            return _with_beside(ctx, [None] * (len(ctx.needs_input_grad) - 3))
        if is_eagers:
            gradients = eager_gradients(ctx, present, [grad_outs[i] for i in present])
            ctx.maybe_clear_saved_tensors()
            if not keeps_graph():
                ctx.held = None
            return _with_beside(ctx, gradients)
        inputs = list(saved_of(ctx))
        ctx.maybe_clear_saved_tensors()
        if ctx.held is not None and not keeps_graph():
            ctx.held = None
        for i in present:
            inputs.append(grad_outs[i])
        del grad_outs
        run = programs.backward_for(tuple(present))
        if len(programs.nodes) > 1:
            run = run.begin
        if torch.is_autocast_enabled(programs.device_type):
            run = partial(outside_autocast, programs.device_type, run)
        if not len_function_stack():
            return _with_beside(ctx, run(inputs))
        with no_torch_function():  # a mode of the user's, or a default device
            return _with_beside(ctx, run(inputs))


def _with_beside(ctx: Any, gradients: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    """What the node returns: its gradients, with those that nodes of chained results have computed."""
    if ctx.beside is not None and not ctx.beside.is_empty:
        gradients = ctx.beside.taken(gradients, ctx.programs.nodes[0])
    return (None, None, None, *gradients)


def applied(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` without its look for functorch's wrappers, argument by argument: the guard has seen that there
    are none."""
    return super(torch.autograd.Function, function).apply


apply = applied(_Dispatched)
