"""Second derivatives: the autograd node of a call, asked for gradients that are themselves differentiated or batched →
those that eager's operators compute, counted by the reason.

The compiled backward computes numbers for one set of grad_outs, and autograd cannot follow it. Under
``create_graph=True`` and ``is_grads_batched=True`` the node's gradients come from
:class:`bridge.dispatch.eager_backward.EagerBackward` instead; what is differentiated or batched further on is torch's
own graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from bridge.base.torch_internals import len_function_stack, no_torch_function
from bridge.dispatch.held import saved_of, tensors_of
from bridge.dispatch.segmented import make_token

__all__ = ["BATCHED", "FOLLOWED", "eager_gradients"]

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


class GivenRun:
    """Gradients at hand that later autograd nodes hand out, as :class:`bridge.dispatch.segmented.SegmentedRun`."""

    def __init__(self, gradients: Sequence[torch.Tensor | None], nodes: Sequence[Sequence[int]]):
        self._gradients, self._nodes = gradients, nodes

    def __call__(self, node: int) -> list[torch.Tensor | None]:
        return [self._gradients[place] for place in self._nodes[node]]


def eager_gradients(ctx: Any, outputs: Sequence[int], grad_outs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """What the call's own autograd node returns: one gradient per input that gets one, and where it has several nodes,
    the next one's token.

    Args:
        ctx: of the call's node.
        outputs: that got a grad_out, and ``grad_outs``: these.

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
        run = GivenRun(gradients, programs.nodes)
        return [*run(0), make_token(programs.device, run)]
