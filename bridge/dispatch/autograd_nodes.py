"""Several autograd nodes of one call: primals → outputs; grad_outs → gradients, as the segments of the backward make
them.

The call's own node is the first to run. It runs the first segment, returns the gradients that are complete then, and
hands a *token* to the next node: a gradient without elements, which carries the pass that has begun. Autograd runs the
nodes in this order, and what waits for their gradients in between. The token is the only one who holds the pass: where
autograd leaves the later nodes out (``torch.autograd.grad`` with some of the inputs), it is gone with the token, and a
graph that is retained begins a new one each time.

Everything is saved at the first node, under the rules of one node.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch

from bridge.base.torch_autograd import applied
from bridge.base.torch_internals import len_function_stack, no_torch_function
from bridge.dispatch.autograd import apply
from bridge.dispatch.backward_nodes import make_token, run_of_token
from bridge.dispatch.call_run import Action, CallValues, outside_autocast
from bridge.dispatch.chained import ChainedGradients
from bridge.dispatch.programs import Programs

__all__ = ["apply_in_nodes"]


class _Later(torch.autograd.Function):
    """A later node. Inputs: programs, gradients beside, its number, inputs that get one, the next one's token."""

    @staticmethod
    def forward(ctx, programs: Programs, beside: ChainedGradients | None, node: int, *wanted: torch.Tensor):
        ctx.programs, ctx.beside, ctx.node = programs, beside, node
        ctx.set_materialize_grads(False)
        with no_torch_function() if len_function_stack() else nullcontext():
            return make_token(programs.device)

    @staticmethod
    def backward(ctx, token: torch.Tensor | None):
        programs, node = ctx.programs, ctx.node
        if token is None:  # the call's own node got no gradient
            return (None,) * len(ctx.needs_input_grad)
        run, device = run_of_token(token), programs.device_type
        with no_torch_function() if len_function_stack() else nullcontext():
            gradients = outside_autocast(device, run, node) if torch.is_autocast_enabled(device) else run(node)
        if ctx.beside is not None and not ctx.beside.is_empty:
            gradients = ctx.beside.taken(gradients, programs.nodes[node])
        return (None, None, None, *gradients, *[token] * (node < len(programs.nodes) - 1))


_later = applied(_Later)


def apply_in_nodes(programs: Programs, actions: list[Action], call: CallValues, *wanted: torch.Tensor):
    """As :func:`bridge.dispatch.autograd.apply`, with a node for each of ``programs.nodes``."""
    nodes = programs.nodes
    token: tuple[torch.Tensor, ...] = ()
    for node in range(len(nodes) - 1, 0, -1):
        token = (_later(programs, call.beside, node, *[wanted[place] for place in nodes[node]], *token),)
    return apply(programs, actions, call, *[wanted[place] for place in nodes[0]], *token)
