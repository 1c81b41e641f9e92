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
from bridge.dispatch.programs import BackwardRun, BoundPrograms, Programs

__all__ = ["Dispatched", "applied", "apply", "run_outside_modes", "started"]


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


class Dispatched(torch.autograd.Function):
    """Forward and backward of a call. Inputs: programs, what the forward does, the call, inputs that get a gradient."""

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
        programs = ctx.programs
        found = started(ctx, grad_outs)
        del grad_outs
        if found is None:
            return (None, None, None, *[None] * programs.num_wanted)
        return (None, None, None, *run_outside_modes(programs, *found))


def started(ctx, grad_outs: tuple[torch.Tensor | None, ...]) -> tuple[BackwardRun, list[torch.Tensor]] | None:
    """The backward for the grad_outs that there are, and its inputs; ``None`` if there are none."""
    if torch.is_grad_enabled():
        raise RuntimeError(_TWICE)
    programs, present = ctx.programs, []
    for i in programs.differentiable:
        if grad_outs[i] is not None:
            present.append(i)
            if not has_storage(grad_outs[i]):
                raise RuntimeError(_BATCHED)
    if not present:
        return None
    inputs = list(ctx.saved_tensors)
    ctx.maybe_clear_saved_tensors()
    for i in present:
        inputs.append(grad_outs[i])
    return programs.backward_for(tuple(present)), inputs


def run_outside_modes(programs: Programs | BoundPrograms, run: Callable[[Any], list], argument: Any) -> list:
    """Runs compiled code of a backward on its one argument, outside autocast and torch function modes."""
    device = programs.device_type
    with no_torch_function() if len_function_stack() else nullcontext():  # the user's, or a default device
        return outside_autocast(device, run, argument) if torch.is_autocast_enabled(device) else run(argument)


def applied(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` without its look for functorch's wrappers, argument by argument: the guard has seen that there
    are none."""
    return super(torch.autograd.Function, function).apply


apply = applied(Dispatched)
