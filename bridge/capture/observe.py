"""Observed run: a module and a call of it, on fake or real tensors → :class:`Observation`, what eager PyTorch does.

An exported graph is functional: aliasing, the order and the memory layout of random draws (draws whose result nobody
uses included), what autograd reaches, custom ``autograd.Function``s and in-place writes are gone from it. Under
``FakeTensorMode`` the module runs as eager would, through the real dispatcher and autograd, without computing
anything, without touching the generator and without touching the module's tensors. The observation is the reference
that the compiled module must reproduce; what cannot be reproduced is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

from bridge.base.errors import Unsupported
from bridge.base.modes import modes_put_back
from bridge.base.objects import objects_of, packed
from bridge.base.torch_internals import compiling_flags, pytree
from bridge.capture.draw_recorder import DrawRecorder
from bridge.capture.generator_watch import generator_watch
from bridge.capture.inplace_rules import InPlaceRules, InPlaceWatcher
from bridge.capture.number_index import NumberIndices
from bridge.capture.observation import Observation
from bridge.capture.op_trace import OpTrace
from bridge.capture.outputs import describe_outputs, geometry_of, judge_replaced, version_of
from bridge.capture.overlap import overlaps
from bridge.capture.own_functions import OwnFunctions
from bridge.capture.recurrent_formulas import RecurrentStandIns
from bridge.capture.tracing import HERE, times_forward_asked
from bridge.capture.validation_reads import ValidationReads
from bridge.capture.whole_functions import WholeFunctions

__all__ = ["observe"]


def observe(
    module: torch.nn.Module,
    state: dict[str, torch.Tensor],
    parameters: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    args: tuple,
    kwargs: dict[str, Any],
    mode: AbstractContextManager,
    *,
    functions: OwnFunctions,
    traced: bool = True,
    advance: Callable[[], int | None] = lambda: None,
    recorders: Sequence[AbstractContextManager] = (),
    modes: Sequence[AbstractContextManager] = (),
) -> Observation:
    """Runs ``module``, on fake tensors unless told otherwise, and reports what eager does.

    Args:
        module: the user's module; it is not changed.
        state: fake tensors for its parameters and buffers by name.
        parameters: those of them that are parameters.
        inputs: fake module tensors and argument tensors, in the order that indices in the result refer to.
        args, kwargs: the sample with fake tensors in it.
        mode: the fake mode that all of them belong to; of real ones, a context that does nothing.
        functions: the user's own, as they were traced.
        traced: whether the trace is wanted. It keeps every tensor until it is complete.
        advance: how far the last draw moved its generator.
        recorders: modes to run under in the place of those that judge writes and note draws and calls.
        modes: what to run under besides, outside of ``mode``.
    """
    argument_leaves, argument_spec = pytree.tree_flatten((args, kwargs))
    rules = InPlaceRules(argument_leaves, parameters, inputs)
    observation = Observation(unsupported=rules.unsupported)
    trace = OpTrace(inputs) if traced else None
    draws = DrawRecorder(observation.draws, rules.complain, trace, inputs, advance, real=not traced)
    recorders = recorders or (InPlaceWatcher(rules, observation.calls), draws)
    before = dict(state)
    geometry, versions = [geometry_of(tensor) for tensor in inputs], [version_of(tensor) for tensor in inputs]
    number_indices, asked = NumberIndices(), times_forward_asked()
    stand_ins = (RecurrentStandIns(), WholeFunctions(), number_indices) if traced else ()
    with modes_put_back() as changed_modes, ValidationReads() as validation, ExitStack() as stack:
        applied = stack.enter_context(functions.observed())
        rules.shared_by_functions = applied.shared
        for context in (*modes, mode, _exporting_flags(), generator_watch(rules), *stand_ins, *recorders):
            stack.enter_context(context)
        result = torch.func.functional_call(module, state, args, kwargs, tie_weights=False)
    moved = zip(inputs, versions, strict=True)
    observation.counted = frozenset(index for index, (tensor, then) in enumerate(moved) if version_of(tensor) != then)
    if geometry != [geometry_of(tensor) for tensor in inputs] and not rules.unsupported:
        reason = "gives a tensor of the module's or the caller's another shape, memory or requires_grad"
        rules.complain("detach_, requires_grad_, set_ or a view in place", reason, "work on a view or a clone of it")
    for changed in changed_modes:
        reason = "forward leaves it changed for what comes after the call"
        rules.unsupported.append(Unsupported(changed, "forward", reason, "set it around the call"))
    observation.checkpointed = rules.checkpointed.of(inputs)
    observation.differentiates, observation.reads_validation = draws.differentiates, validation.found
    observation.asks = times_forward_asked() != asked
    leaves_now, spec_now = pytree.tree_flatten((args, kwargs))
    if spec_now != argument_spec or any(now is not then for now, then in zip(leaves_now, argument_leaves, strict=True)):
        reason = "changes a list, a dict or an object that was passed to the module"
        rules.unsupported.append(Unsupported("an argument", "forward", reason, "work on a copy of it"))
    observation.replaced = [name for name, tensor in before.items() if state[name] is not tensor]
    for name in observation.replaced:
        is_parameter = any(before[name] is each for each in parameters)
        judge_replaced(name, before[name], state[name], is_parameter, inputs, rules)
    for tensor in set(state.values()) - set(parameters):
        if tensor.requires_grad and tensor.grad_fn is not None:
            rules.complain("buffer", "forward leaves a buffer that requires grad", "update it under torch.no_grad()")
    result = packed(result)
    observation.objects = objects_of(result)
    leaves, observation.out_spec = pytree.tree_flatten(result)
    if not traced:
        observation.results = leaves
    describe_outputs(leaves, inputs, observation, rules, applied)
    returned = [pair for pair in zip(leaves, observation.outputs, strict=True) if pair[1].is_tensor]
    observation.unsupported += number_indices.returned(returned)
    observation.unsupported += overlaps([leaf for leaf, output in returned if not output.alias_of])
    # a trace has no backward of the user's own, which two calls with equal traces may have different ones of
    observation.trace = trace.finish(leaves, list(state.items())) if trace and not applied.any else None
    return observation


def _exporting_flags() -> AbstractContextManager:
    """Libraries branch on ``torch.compiler.is_exporting()``, ``is_compiling()``: take the exported graph's branch.

    On real tensors too: transformers looks for packed sequences in numbers, but not while anything is traced.
    """
    return compiling_flags(HERE)
