"""The ``torch.autograd.Function`` of a compiled call: primals → outputs; grad_outs → gradients of the wanted inputs.

What the backward reads goes through ``save_for_backward``: inputs, outputs and captures alike, so that
``saved_tensors_hooks`` see them and in-place changes are noticed. The node releases them as the backward starts,
unless the graph is retained, and the program drops each one after its last use.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from bridge.base.torch_internals import has_storage, len_function_stack, no_torch_function
from bridge.dispatch.call_run import Action, Call, outside_autocast
from bridge.dispatch.programs import BoundPrograms, Programs

__all__ = ["applied", "apply"]


_TWICE = (
    "create_graph=True through a module dispatched to TVM: its backward is compiled and cannot be "
    "differentiated again. Call remove_tvm_dispatch(module) first (or keep it out of what "
    "torch.compile(backend='tvm_dispatch') compiles), or leave create_graph off."
)
_BATCHED = (
    "batched gradients (is_grads_batched=True, jacobian(vectorize=True), torch.func) through a module "
    "dispatched to TVM: its backward is compiled for one. Call remove_tvm_dispatch(module) first, or "
    "compute them one by one."
)


class _Dispatched(torch.autograd.Function):
    """Forward and backward of a call. Inputs: programs, what the forward does, the call, inputs that get a gradient.

    Where the backward has several nodes this is the first to run, and its last input is the next one's token
    (:mod:`bridge.dispatch.autograd_nodes`).
    """

    @staticmethod
    def forward(ctx, programs: Programs | BoundPrograms, actions: list[Action], call: Call, *wanted: torch.Tensor):
        for act in actions:
            act(call)
        values = call.values
        ctx.save_for_backward(*call.saved)
        call.values = call.saved = None  # autograd's from here on
        ctx.programs = programs
        ctx.set_materialize_grads(False)
        if programs.not_differentiable:
            ctx.mark_non_differentiable(*[values[i] for i in programs.not_differentiable])
        return tuple(values[: programs.num_outputs])

    @staticmethod
    def backward(ctx, *grad_outs: torch.Tensor | None):
        if torch.is_grad_enabled():
            raise RuntimeError(_TWICE)
        programs, present = ctx.programs, []
        for i in programs.differentiable:
            if grad_outs[i] is not None:
                present.append(i)
                if not has_storage(grad_outs[i]):
                    raise RuntimeError(_BATCHED)
        if not present:
            return (None,) * len(ctx.needs_input_grad)
        inputs = list(ctx.saved_tensors)
        ctx.maybe_clear_saved_tensors()
        for i in present:
            inputs.append(grad_outs[i])
        del grad_outs
        run = programs.backward_for(tuple(present))
        if len(programs.nodes) > 1:
            run = run.begin
        device = programs.device_type
        with no_torch_function() if len_function_stack() else nullcontext():  # the user's, or a default device
            gradients = outside_autocast(device, run, inputs) if torch.is_autocast_enabled(device) else run(inputs)
        return (None, None, None, *gradients)


def applied(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` without its look for functorch's wrappers, argument by argument: the guard has seen that there
    are none."""
    return super(torch.autograd.Function, function).apply


apply = applied(_Dispatched)
