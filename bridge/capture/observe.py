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

from bridge.base.complex_views import is_parts_view, offset_in
from bridge.base.errors import Unsupported
from bridge.base.modes import modes_put_back
from bridge.base.objects import objects_of, packed
from bridge.base.torch_autograd import GENERATED, FunctionNode
from bridge.base.torch_internals import compiling_flags, is_dense, pytree, storage_id
from bridge.capture.draw_recorder import DrawRecorder
from bridge.capture.generator_watch import generator_watch
from bridge.capture.inplace_rules import InPlaceRules, InPlaceWatcher
from bridge.capture.number_index import NumberIndices
from bridge.capture.observation import Observation, Output
from bridge.capture.op_trace import OpTrace
from bridge.capture.overlap import overlaps
from bridge.capture.own_functions import Applied, OwnFunctions
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
    geometry, versions = [_geometry(tensor) for tensor in inputs], [_version(tensor) for tensor in inputs]
    number_indices, asked = NumberIndices(), times_forward_asked()
    stand_ins = (RecurrentStandIns(), WholeFunctions(), number_indices) if traced else ()
    with modes_put_back() as changed_modes, ValidationReads() as validation, ExitStack() as stack:
        applied = stack.enter_context(functions.observed())
        rules.shared_by_functions = applied.shared
        for context in (*modes, mode, _exporting_flags(), generator_watch(rules), *stand_ins, *recorders):
            stack.enter_context(context)
        result = torch.func.functional_call(module, state, args, kwargs, tie_weights=False)
    moved = zip(inputs, versions, strict=True)
    observation.counted = frozenset(index for index, (tensor, then) in enumerate(moved) if _version(tensor) != then)
    if geometry != [_geometry(tensor) for tensor in inputs] and not rules.unsupported:
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
        _judge_replaced(name, before[name], state[name], is_parameter, inputs, rules)
    for tensor in set(state.values()) - set(parameters):
        if tensor.requires_grad and tensor.grad_fn is not None:
            rules.complain("buffer", "forward leaves a buffer that requires grad", "update it under torch.no_grad()")
    result = packed(result)
    observation.objects = objects_of(result)
    leaves, observation.out_spec = pytree.tree_flatten(result)
    if not traced:
        observation.results = leaves
    _describe_outputs(leaves, inputs, observation, rules, applied)
    returned = [pair for pair in zip(leaves, observation.outputs, strict=True) if pair[1].is_tensor]
    observation.unsupported += number_indices.returned(returned)
    observation.unsupported += overlaps([leaf for leaf, output in returned if not output.alias_of])
    # a trace has no backward of the user's own, which two calls with equal traces may have different ones of
    observation.trace = trace.finish(leaves, list(state.items())) if trace and not applied.any else None
    return observation


def _judge_replaced(
    name: str, before: torch.Tensor, after: Any, is_parameter: bool, inputs: Sequence[torch.Tensor], rules: InPlaceRules
) -> None:
    """A buffer that forward sets to another tensor, ``self.mean = self.mean * 0.9``: a compiled call writes the numbers
    where the old one lies, which is the same for those who read them under this name alone."""
    others = {storage_id(each) for each in inputs if each is not before}
    if is_parameter:
        rules.complain(f"parameter '{name}'", "forward sets it to another tensor", "write into it, outside of forward")
    elif not isinstance(after, torch.Tensor) or (before.dtype, before.shape) != (after.dtype, after.shape):
        form = f"{after.dtype} of shape {tuple(after.shape)}" if isinstance(after, torch.Tensor) else repr(after)
        reason = f"becomes {form}, was {before.dtype} of shape {tuple(before.shape)}"
        rules.complain(f"buffer '{name}'", reason, "keep its form")
    elif storage_id(before) in others:
        reason = "is set to another tensor, where the old one has a second name"
        rules.complain(f"buffer '{name}'", reason, "write into it (copy_)")
    elif storage_id(after) in others:
        reason = "is set to memory that has another name, of an argument or of the module's"
        rules.complain(f"buffer '{name}'", reason, "clone it")


def _geometry(tensor: torch.Tensor) -> tuple:
    """What an in-place change of a tensor's own description alters; a write of numbers has its own rules."""
    is_leaf_with_grad = tensor.grad_fn is None and tensor.requires_grad
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), storage_id(tensor), is_leaf_with_grad


def _version(tensor: torch.Tensor) -> int:
    """How often autograd has seen the tensor written; 0 for one made in inference mode, of which it keeps no count."""
    return 0 if tensor.is_inference() else tensor._version


def _exporting_flags() -> AbstractContextManager:
    """Libraries branch on ``torch.compiler.is_exporting()``, ``is_compiling()``: take the exported graph's branch.

    On real tensors too: transformers looks for packed sequences in numbers, but not while anything is traced.
    """
    return compiling_flags(HERE)


def _describe_outputs(
    leaves: Sequence[Any],
    inputs: Sequence[torch.Tensor],
    observation: Observation,
    rules: InPlaceRules,
    applied: Applied,
) -> None:
    by_storage = {storage_id(tensor): ("input", index) for index, tensor in reversed(list(enumerate(inputs)))}
    index_of = {id(tensor): index for index, tensor in enumerate(inputs)}
    first_outputs: dict[int, int] = {}
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            observation.outputs.append(Output(value=leaf))
            continue
        alias, same = None, False
        if id(leaf) in index_of:
            alias, same = ("input", index_of[id(leaf)]), True
        elif id(leaf) in first_outputs:
            alias, same = ("output", first_outputs[id(leaf)]), True
        elif storage_id(leaf) in by_storage and leaf.numel():
            alias = by_storage[storage_id(leaf)]
        elif leaf.numel():
            alias = _spanning_output(leaf, index, leaves)
        first_outputs.setdefault(id(leaf), index)
        base = (inputs if alias[0] == "input" else leaves)[alias[1]] if alias else leaf
        if leaf.requires_grad and leaf.grad_fn is None and not same:
            observation.unsupported.append(
                Unsupported("requires_grad_", "the module's result", "returns a new leaf that requires grad")
            )
        if leaf.dtype != base.dtype and not is_parts_view(leaf, base):
            reason = "returns a view of another dtype of something that the caller can see"
            observation.unsupported.append(Unsupported("view_dtype", "the module's result", reason))
        if leaf.is_neg() != base.is_neg():
            reason = "returns a view with other signs of something that the caller can see"
            observation.unsupported.append(Unsupported("neg_view", "the module's result", reason))
        if alias and not same and storage_id(leaf) in applied.shared:
            reason = "returns a view that an autograd.Function has made; its gradient is another than a view's"
            observation.unsupported.append(Unsupported("a view", "the module's result", reason, "clone it"))
        reaches = _reachable(leaf, inputs, rules, applied)
        observation.outputs.append(
            Output(
                is_tensor=True,
                alias_of=alias,
                is_same_object=same,
                shape=tuple(leaf.shape),
                stride=leaf.stride(),
                offset=offset_in(leaf, base),
                dtype=leaf.dtype,
                is_conjugate=leaf.is_conj() != base.is_conj(),
                requires_grad=leaf.requires_grad,
                reaches=reaches,
            )
        )


def _spanning_output(leaf: torch.Tensor, position: int, leaves: Sequence[Any]) -> tuple[str, int] | None:
    """The output that owns the memory and covers all of it, so that ``leaf`` is a view of it.

    Of several, the first of those that require grad, if any does. ``None`` for that one itself.
    """
    group = [
        (index, other)
        for index, other in enumerate(leaves)
        if isinstance(other, torch.Tensor) and storage_id(other) == storage_id(leaf) and _spans(other)
    ]
    for index, other in sorted(group, key=lambda pair: (not pair[1].requires_grad, pair[0])):
        if index == position:
            return None
        if other.dtype == leaf.dtype and (other.requires_grad or not leaf.requires_grad):
            return "output", index
    return None


def _spans(tensor: torch.Tensor) -> bool:
    covers = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
    return covers and tensor.storage_offset() == 0 and is_dense(tensor)


def _reachable(
    leaf: torch.Tensor, inputs: Sequence[torch.Tensor], rules: InPlaceRules, applied: Applied
) -> frozenset[int]:
    """Indices of the inputs whose gradient ``leaf`` contributes to; complains about Functions that were not traced.

    A leaf that forward makes itself, as wav2vec2's encoder does for its checkpoints, takes a gradient that nobody sees;
    it counts only where nothing else makes the result require grad.
    """
    index_of = {id(tensor): index for index, tensor in enumerate(inputs)}
    found: set[int] = set()
    seen: set[Any] = set()
    makes_leaf = False
    stack = [leaf.grad_fn] if leaf.grad_fn is not None else []
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable") and id(node.variable) in index_of:
            found.add(index_of[id(node.variable)])
        elif hasattr(node, "variable"):
            makes_leaf = True
        is_operators = type(node).__name__.startswith(GENERATED)
        use = applied.nodes.get(node)
        if isinstance(node, FunctionNode) and use is None and not is_operators:
            rules.custom_function(type(node).__name__.removesuffix("Backward"))
        without = use.without if use is not None else ()
        stack.extend(
            parent
            for place, (parent, _) in enumerate(node.next_functions)
            if parent is not None and place not in without
        )
    if makes_leaf and not found:
        rules.new_leaf()
    return frozenset(found)
