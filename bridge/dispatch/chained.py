"""Chained results: results of a call that other results are computed from → the same, with autograd nodes between them.

A call has one autograd node, which gets all results' gradients. If ``z, head(z)`` is returned, eager has the whole
gradient of ``z`` for its hooks, for ``retain_grad`` and for ``autograd.grad``. So a result that is computed from other
results gets a node of its own in front of the call's, with edges to them. Unless one of their gradients is observed, it
passes its gradient on to the call's node. Otherwise eager's operators compute the gradients of the observed results,
and of the inputs along paths that bypass them; the call's node adds the latter to its own.
"""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch

from bridge.base.tensor_properties import as_parts
from bridge.base.torch_autograd import applied
from bridge.base.torch_internals import (
    VF,
    current_graph_task_id,
    engine_run_backward,
    len_function_stack,
    no_torch_function,
    will_engine_execute_node,
)
from bridge.capture import Output
from bridge.dispatch.eager_backward import saved_of, tensors_of

__all__ = ["LOOKED_AT", "ChainedGradients", "begin_chains", "chain_results", "chains_of", "take_hooks"]

LOOKED_AT = "backward through a result that has a hook or is asked for: computed by eager's operators"

Chain = tuple[int, tuple[int, ...]]
"""The place of a result that is computed from other results, and their places."""

_BACKWARD, _WANTED = engine_run_backward.__code__, 3
"""Torch's code that calls the autograd engine, and the index of its ``inputs`` argument."""
_LOADED = (
    "a hook on a result, or a gradient with respect to it, of a module of load_compiled that computes another result "
    "of it: what it was compiled from is not in the folder. Dispatch the module itself with add_tvm_dispatch."
)


def chains_of(outputs: Sequence[Output], positions: Sequence[int | None]) -> tuple[Chain, ...]:
    """The results that are computed from other results, sources first; places are among the computed tensors."""
    found: dict[int, set[int]] = {}
    for output, place in zip(outputs, positions, strict=True):
        through = {positions[leaf] for leaf in output.through} - {None, place}
        if place is not None and through:
            found.setdefault(place, set()).update(through)
    return tuple((place, tuple(sorted(through))) for place, through in sorted(found.items(), key=lambda x: len(x[1])))


class ChainedGradients:
    """Gradients of a call's inputs that the nodes of its chained results have computed, in one autograd pass."""

    def __init__(self) -> None:
        self._pass = -1
        self._gradients: dict[int, torch.Tensor] = {}

    def add(self, gradients: Sequence[torch.Tensor | None]) -> None:
        if (now := current_graph_task_id()) != self._pass:
            self._pass, self._gradients = now, {}
        for place, gradient in enumerate(gradients):
            if gradient is not None:
                known = self._gradients.get(place)
                self._gradients[place] = gradient if known is None else known + gradient

    @property
    def is_empty(self) -> bool:
        return not self._gradients or current_graph_task_id() != self._pass

    def taken(self, gradients: Sequence[torch.Tensor | None], places: Sequence[int]) -> list[torch.Tensor | None]:
        """``gradients`` of the inputs at ``places`` plus the stored ones, which are removed."""
        found = list(gradients)
        for index, place in enumerate(places if not self.is_empty else ()):
            more = self._gradients.pop(place, None)
            if more is not None:
                found[index] = more if found[index] is None else found[index] + more
        return found


class _Hooks(OrderedDict):
    """Hooks of one of several results, skipped for a ``None`` gradient.

    The call's one node calls the hooks of all its results, where eager's node of a result without gradient never runs.
    """

    def __setitem__(self, key: Any, hook: Callable[[torch.Tensor], Any]) -> None:
        super().__setitem__(key, lambda grad: None if grad is None else hook(grad))


def take_hooks(call: Any) -> None:
    """Gives each result a :class:`_Hooks` for later hooks, registered as in ``Tensor.register_hook``."""
    for tensor in call.computed:
        _take_hooks_of(tensor)


def _take_hooks_of(tensor: torch.Tensor) -> None:
    if tensor.requires_grad and tensor._backward_hooks is None:
        tensor._backward_hooks = _Hooks()
        tensor.grad_fn._register_hook_dict(tensor)


class _Looked:
    """Whether the running backward observes a result's gradient: by a hook, ``retain_grad`` or ``autograd.grad``."""

    def __init__(self, tensor: torch.Tensor):
        self._alive = weakref.ref(tensor)
        _take_hooks_of(tensor)
        self._hooks, self._version = tensor._backward_hooks, tensor._version

    def tensor(self) -> torch.Tensor | None:
        """The result, if it is alive and unchanged."""
        tensor = self._alive()
        return None if tensor is None or tensor._version != self._version else tensor

    def __call__(self) -> bool:
        if self._hooks:
            return True
        tensor = self._alive()
        if tensor is None:
            return False
        return tensor.retains_grad or (not will_engine_execute_node(_probe().grad_fn) and _is_asked_for(tensor))


def _is_asked_for(tensor: torch.Tensor) -> bool:
    """Whether a tensor may be an input of the running backward (``autograd.grad``, ``inputs=``)."""
    frame = sys._getframe()
    while frame is not None and frame.f_code is not _BACKWARD:
        frame = frame.f_back
    if frame is None:  # a device thread of the engine
        return True
    wanted = frame.f_locals["args"][_WANTED]
    return any(each is tensor or getattr(each, "node", None) is tensor.grad_fn for each in wanted)


@cache
def _probe() -> torch.Tensor:
    """A private tensor, whose node runs in a backward for all leaves but not in one for selected inputs."""
    with torch.enable_grad():
        return VF.zeros((), requires_grad=True).view(())


class _Chained(torch.autograd.Function):
    """Autograd node of a chained result: the result + its source results → the result."""

    @staticmethod
    def forward(
        ctx,
        programs: Any,
        call: Any,
        beside: ChainedGradients,
        chain: Chain,
        probe: Any,
        result: torch.Tensor,
        *through,
    ):
        ctx.programs, ctx.call, ctx.beside, ctx.chain = programs, call, beside, chain
        ctx.looked = [_Looked(each) for each in through]
        ctx.set_materialize_grads(False)
        return result.detach()

    @staticmethod
    def backward(ctx, grad: torch.Tensor | None):
        nothing = (None,) * len(ctx.looked)
        if grad is None or not any(looked() for looked in ctx.looked):
            return (None, None, None, None, None, grad, *nothing)
        backward, main = ctx.programs.eager_backward, ctx.call
        if backward is None:
            raise RuntimeError(_LOADED)
        place, through = ctx.chain
        ctx.programs.eager_backwards[LOOKED_AT] += 1
        with no_torch_function() if len_function_stack() else nullcontext():
            held = tensors_of(main.held) if backward.held else ()
            primals = backward.primals(saved_of(main), held)
            cut = {each: looked.tensor() for each, looked in zip(through, ctx.looked, strict=True)}
            found = backward(primals, [place], [as_parts(grad)], torch.is_grad_enabled(), cut)
        ctx.beside.add(found[: len(found) - len(through)])
        return (None, None, None, None, None, None, *found[len(found) - len(through) :])


_chained = applied(_Chained)


def begin_chains(call: Any) -> None:
    """Before the forward: gives the call a container for gradients of nodes of chained results."""
    call.beside = ChainedGradients()


def chain_results(programs: Any, chains: Sequence[Chain], call: Any) -> None:
    """Gives chained results among a call's computed tensors autograd nodes of their own."""
    if not torch.is_grad_enabled():
        return
    node, found = _call_node(call.computed[chains[0][0]]), list(call.computed)
    for chain in chains:
        place, through = chain
        given = found[place], *[found[each] for each in through]
        found[place] = _chained(programs, node, call.beside, chain, _probe(), *given)
    call.computed = found


def _call_node(result: torch.Tensor) -> Any:
    """The call's autograd node; a complex result is a view of real pairs, one node further."""
    node = result.grad_fn
    return node.next_functions[0][0] if result.is_complex() else node
