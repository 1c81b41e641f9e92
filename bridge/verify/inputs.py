"""Inputs and reference results of the stages, from an eager run of the sample on copies; deviation and tolerance."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from bridge.base.devices import working_for
from bridge.base.generators import gpus_in_use
from bridge.base.modes import autocast_to
from bridge.base.pytrees import unpacked
from bridge.base.tensor_properties import as_parts
from bridge.base.torch_internals import pytree
from bridge.lowering import LoweredCall, Sample
from bridge.reference import interpret
from bridge.rng import Draws


@dataclass(frozen=True)
class Reference:
    """The sample call in eager.

    Attributes:
        primals: the stages' inputs: module tensors (values before the call), arguments, random draws, dropout masks.
        grad_outs: one per differentiable output, standard normal.
        results: the computed outputs, then the new values of mutated buffers, in the stages' order.
        gradients: autograd's, one per wanted input (zeros if autograd has none).
    """

    primals: list[torch.Tensor]
    grad_outs: list[torch.Tensor]
    results: list[torch.Tensor]
    gradients: list[torch.Tensor]


def sample_of(lowered: LoweredCall) -> Sample:
    """The sample of a lowered call. ``ValueError`` if there is none."""
    if lowered.sample is None:
        raise ValueError(
            "this Lowered belongs to a dispatched module, which keeps no sample: call lower(module, sample) for one "
            "that does"
        )
    return lowered.sample


def copied(sample: Sample) -> Sample:
    """A copy of the module, with the training flags of the lowering, and of the arguments."""
    try:
        module = copy.deepcopy(sample.module)
    except (RuntimeError, TypeError) as error:
        name = type(sample.module).__name__
        raise ValueError(f"{name} cannot be copied, and stages are only checked on a copy: {error}") from error
    for path, child in module.named_modules():
        child.training = sample.training[path]
    leaves, spec = pytree.tree_flatten((sample.args, sample.kwargs))
    leaves = [
        leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf
        for leaf in leaves
    ]
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    return replace(sample, module=module, args=args, kwargs=kwargs)


def _tensor(module: nn.Module, path: str) -> torch.Tensor:
    *owners, name = path.split(".")
    for owner in owners:
        module = getattr(module, owner)
    return getattr(module, name)


def _inputs(lowered: LoweredCall, sample: Sample) -> list[torch.Tensor]:
    captured = lowered.captured
    tensors = [_tensor(sample.module, spec.name) for spec in captured.module_tensors]
    for tensor, spec in zip(tensors, captured.module_tensors, strict=True):
        if (tuple(tensor.shape), tensor.dtype) != (spec.shape, spec.dtype):
            raise ValueError(f"{spec.name} has changed its shape or type since the module was lowered; lower it again")
        if tensor.is_leaf:
            tensor.requires_grad_(spec.requires_grad)
    leaves = pytree.tree_leaves((sample.args, sample.kwargs))
    return tensors + [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _grad_outs(lowered: LoweredCall, results: Sequence[torch.Tensor], seed: int) -> list[torch.Tensor]:
    generator, likes = torch.Generator().manual_seed(seed), [results[position] for position in lowered.differentiable]
    return [torch.randn(each.shape, generator=generator, dtype=torch.float64).to(each) for each in likes]


def eager_reference(lowered: LoweredCall, *, seed: int) -> Reference:
    """Runs the sample in eager, on copies, under ``seed``; restores the generator.

    Raises:
        ValueError: there is no sample, or the module has changed since it was lowered or cannot be copied.
    """
    sample = copied(sample_of(lowered))
    captured, imported = lowered.captured, lowered.imported
    inputs, used = _inputs(lowered, sample), (*imported.input_draws, *imported.dropout_draws)
    draws = Draws(captured.draws, imported.dropout_draws, used, captured.module_name, (), captured.device)
    before = [as_parts(tensor.detach()).clone() for tensor in inputs]
    with torch.random.fork_rng(devices=gpus_in_use()), torch.set_grad_enabled(bool(lowered.differentiable)):
        torch.manual_seed(seed)
        drawn = draws.make(inputs)
        torch.manual_seed(seed)
        with working_for(captured.device), autocast_to(sample.autocast):
            args, kwargs = unpacked((sample.args, sample.kwargs))
            result = sample.module.forward(*args, **kwargs)
    leaves = pytree.tree_leaves(result)
    outputs: dict[int, torch.Tensor] = {
        position: leaf for leaf, position in zip(leaves, imported.output_of, strict=True) if position is not None
    }
    ordered = [as_parts(outputs[position]) for position in range(imported.num_outputs)]
    # A mutated buffer is read from the copy again: forward may have replaced the object.
    written = [
        _tensor(sample.module, captured.input_name(index)) if index < len(captured.module_tensors) else inputs[index]
        for index, _ in captured.mutated
    ]
    grad_outs = _grad_outs(lowered, ordered, seed)
    gradients = torchs_gradients(lowered, ordered, inputs, grad_outs)
    results = [as_parts(tensor.detach()).clone() for tensor in (*ordered, *written)]
    return Reference(before + drawn, grad_outs, results, gradients)


def torchs_gradients(
    lowered: LoweredCall, outputs: Sequence[Any], inputs: Sequence[torch.Tensor], grad_outs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Gradients of the call's wanted inputs by autograd, from its differentiable outputs."""
    wanted = [inputs[index] for index in lowered.wanted]
    if not wanted:
        return []
    seeded = [outputs[position] for position in lowered.differentiable]
    found = torch.autograd.grad(seeded, wanted, grad_outs, allow_unused=True)
    return [as_parts(torch.zeros_like(x) if g is None else g.detach()) for x, g in zip(wanted, found, strict=True)]


def stage_inputs(lowered: LoweredCall, stage: str, *, seed: int = 0) -> list[torch.Tensor]:
    """The arguments of ``lowered[stage].run`` for the sample.

    The stages up to ``forward``, and ``split forward``, take the primals: module tensors, arguments, random draws
    and dropout masks, drawn under ``seed``. ``joint`` and ``cleaned`` take the primals and a normal grad_out for each
    differentiable output. ``split backward`` takes the saved tensors and the grad_outs.

    Raises:
        KeyError: there is no stage of this name.
        ValueError: there is no sample, or the module has changed since it was lowered or cannot be copied.
    """
    lowered[stage]
    reference = eager_reference(lowered, seed=seed)
    if stage in ("joint", "cleaned"):
        return reference.primals + reference.grad_outs
    if stage == "split backward":
        return backward_inputs(lowered, reference)
    return reference.primals


def backward_inputs(
    lowered: LoweredCall, reference: Reference, forward: Sequence[torch.Tensor] | None = None
) -> list[torch.Tensor]:
    """The backward's inputs: saved tensors, grad_outs; ``forward``: the forward's results, computed by default."""
    if forward is None:
        with torch.no_grad(), working_for(lowered.captured.device), autocast_to(None):
            forward = interpret(lowered.forward, reference.primals).results
    plan = lowered.plan
    saved = [reference.primals[index] for index in plan.saved_primals]
    saved += [forward[index] for index in plan.saved_outputs]
    return [*saved, *forward[lowered.num_results :], *reference.grad_outs]


#: Rounding in float64 stays below this share of a tensor's largest element, for networks of usual depth.
EXACT = 1e-9
#: Deviations are relative to at least this share of the largest element of all compared tensors: a much smaller tensor
#: is noise around zero (a key's bias under a softmax has a gradient of zero).
NOISE = 1e-3


def tolerance(dtypes: Iterable[torch.dtype]) -> float:
    """The largest deviation explained by rounding: half of the digits of the narrowest floating dtype."""
    floats = [dtype for dtype in dtypes if dtype.is_floating_point]
    eps = max((torch.finfo(dtype).eps for dtype in floats), default=0.0)
    return EXACT if eps <= torch.finfo(torch.float64).eps else math.sqrt(eps)


def largest(tensors: Sequence[torch.Tensor]) -> float:
    """The largest finite absolute value of floating point tensors."""
    sizes = [_size(tensor) for tensor in tensors if tensor.is_floating_point()]
    return max(sizes, default=0.0)


def _size(tensor: torch.Tensor) -> float:
    finite = tensor.detach()[torch.isfinite(tensor)]
    return float(finite.abs().max()) if finite.numel() else 0.0


def deviation(found: torch.Tensor, wanted: torch.Tensor, *, scale: float = 0.0) -> float:
    """The largest difference, relative to ``wanted``'s largest element.

    ``inf`` if shapes, integers, or the places of nan or infinities differ. ``scale``: the largest element of all
    compared tensors, see :data:`NOISE`.
    """
    if found.shape != wanted.shape:
        return math.inf
    if found.numel() == 0:
        return 0.0
    if not wanted.is_floating_point() or not found.is_floating_point():
        return 0.0 if torch.equal(found.to(torch.int64), wanted.to(torch.int64)) else math.inf
    found, wanted = found.detach().double(), wanted.detach().double()
    finite = torch.isfinite(wanted)
    odd = ~finite
    if not torch.equal(torch.isfinite(found), finite) or not torch.equal(found[odd].isnan(), wanted[odd].isnan()):
        return math.inf
    both = odd & ~wanted.isnan()
    if not torch.equal(found[both], wanted[both]):
        return math.inf
    difference = float((found[finite] - wanted[finite]).abs().max()) if bool(finite.any()) else 0.0
    if difference == 0.0:
        return 0.0
    return difference / max(_size(wanted), NOISE * scale, torch.finfo(torch.float64).tiny)
