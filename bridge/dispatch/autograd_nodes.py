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

import torch

from bridge.base.torch_internals import len_function_stack, no_torch_function
from bridge.dispatch.autograd import Dispatched, applied, run_outside_modes, started
from bridge.dispatch.call_run import Action, Call
from bridge.dispatch.programs import BoundPrograms, Programs

__all__ = ["apply_in_nodes"]

_REPLACED = (
    "the gradient between two autograd nodes of a module dispatched to TVM was replaced: hooks on autograd nodes have "
    "to leave gradients without elements as they are. Let them, or call remove_tvm_dispatch(module) first."
)


class _First(Dispatched):
    """The node that the call's outputs belong to; its last input is the token of the second."""

    @staticmethod
    def backward(ctx, *grad_outs: torch.Tensor | None):
        programs = ctx.programs
        found = started(ctx, grad_outs)
        del grad_outs
        if found is None:
            return (None, None, None, *[None] * len(programs.nodes[0]), None)
        backward, inputs = found
        run = backward.begin(inputs)
        gradients = run_outside_modes(programs, run, 0)
        token = _token(programs.device)
        token.run = run
        return (None, None, None, *gradients, token)


def _token(device: torch.device) -> torch.Tensor:
    """Hidden from the user's torch function modes."""
    if not len_function_stack():
        return torch.empty(0, device=device)
    with no_torch_function():
        return torch.empty(0, device=device)


class _Later(torch.autograd.Function):
    """A later node. Inputs: programs, which one it is, inputs that get a gradient, the next one's token; its token."""

    @staticmethod
    def forward(ctx, programs: Programs | BoundPrograms, node: int, *wanted: torch.Tensor):
        ctx.programs, ctx.node = programs, node
        ctx.set_materialize_grads(False)
        return torch.empty(0, device=programs.device)

    @staticmethod
    def backward(ctx, token: torch.Tensor | None):
        programs, node = ctx.programs, ctx.node
        is_last = node == len(programs.nodes) - 1
        if token is None:
            return (None, None, *[None] * len(programs.nodes[node]), *[None] * (not is_last))
        run = getattr(token, "run", None)
        if run is None:
            raise RuntimeError(_REPLACED)
        gradients = run_outside_modes(programs, run, node)
        return (None, None, *gradients) if is_last else (None, None, *gradients, token)


_first, _later = applied(_First), applied(_Later)


def apply_in_nodes(programs: Programs | BoundPrograms, actions: list[Action], call: Call, *wanted: torch.Tensor):
    """As :func:`bridge.dispatch.autograd.apply`, with a node for each of ``programs.nodes``."""
    nodes = programs.nodes
    token: tuple[torch.Tensor, ...] = ()
    for node in range(len(nodes) - 1, 0, -1):
        token = (_later(programs, node, *[wanted[place] for place in nodes[node]], *token),)
    return _first(programs, actions, call, *[wanted[place] for place in nodes[0]], *token)
