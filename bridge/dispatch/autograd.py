"""The ``torch.autograd.Function`` of a compiled call: primals → outputs; grad_outs → gradients of the wanted inputs.

What the backward reads goes through ``save_for_backward``: inputs, outputs and captures alike, so that
``saved_tensors_hooks`` see them and in-place changes are noticed. The node releases them as the backward starts,
unless the graph is retained, and the program drops each one after its last use.
"""

from __future__ import annotations

import torch

from bridge.base.torch_internals import has_storage
from bridge.dispatch.programs import Programs, outside_autocast

__all__ = ["apply"]


class _Dispatched(torch.autograd.Function):
    """Forward and backward of a call. Inputs: the programs, all primals, then the inputs that get a gradient."""

    @staticmethod
    def forward(ctx, programs: Programs, primals: list[torch.Tensor], *wanted: torch.Tensor):
        values = programs.run_forward(primals)
        ctx.save_for_backward(*programs.saved(primals, values))
        programs.write_back(primals, values)
        ctx.programs = programs
        ctx.set_materialize_grads(False)
        if programs.not_differentiable:
            ctx.mark_non_differentiable(*[values[i] for i in programs.not_differentiable])
        return tuple(values[: programs.num_outputs])

    @staticmethod
    def backward(ctx, *grad_outs: torch.Tensor | None):
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True through a module dispatched to TVM: its backward is compiled and cannot be "
                "differentiated again. Call remove_tvm_dispatch(module) first (or keep it out of what "
                "torch.compile(backend='tvm_dispatch') compiles), or leave create_graph off."
            )
        if any(grad is not None and not has_storage(grad) for grad in grad_outs):
            raise RuntimeError(
                "batched gradients (is_grads_batched=True, jacobian(vectorize=True), torch.func) through a module "
                "dispatched to TVM: its backward is compiled for one. Call remove_tvm_dispatch(module) first, or "
                "compute them one by one."
            )
        programs = ctx.programs
        present = tuple([i for i in programs.differentiable if grad_outs[i] is not None])
        if not present:
            return (None, None, *[None] * len(programs.wanted))
        inputs = list(ctx.saved_tensors)
        ctx.maybe_clear_saved_tensors()
        inputs += [grad_outs[i] for i in present]
        del grad_outs
        return (None, None, *outside_autocast(programs.backward_for(present), inputs))


# autograd.Function.apply looks for functorch's wrappers, argument by argument; the guard has seen that there are none
apply = super(torch.autograd.Function, _Dispatched).apply
