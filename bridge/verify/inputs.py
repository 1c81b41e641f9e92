"""Inputs and reference results of the stages, from an eager run of the sample on copies; deviation and tolerance.

Fault localization: a stage that deviates → the first wrong operation.
Passes preserve variables' names, so two stages are compared variable by variable; the first difference is the error.
Gradients have no counterpart in the previous stage: each operator's gradient rule is compared with autograd through
that operator alone. A compiled function is recompiled with all its variables as results (which changes none of them,
see :mod:`bridge.compile.schedule.fuse`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

import autodiff
from autodiff.ir import (
    Call,
    Expr,
    Function,
    TensorType,
    TupleGetItem,
    TupleType,
    Var,
    bindings,
    build_function,
    is_float,
    op_name,
    results,
    used_vars,
)
from bridge.base.devices import HOST, working_for
from bridge.base.generators import gpus_in_use
from bridge.base.modes import autocast_to
from bridge.base.pytrees import unpacked
from bridge.base.tensor_properties import as_parts
from bridge.base.torch_internals import pytree
from bridge.compile import CompileOptions, Program, backend_for, compile_function
from bridge.lowering import LoweredCall, Origin, Sample, binding_line, short_op
from bridge.reference import InterpretedRun, interpret
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


@dataclass(frozen=True)
class Culprit:
    """The operation that introduces an error.

    Attributes:
        binding: the variable, as in the stage's script.
        op: the operator that computes it, or whose gradient rule is wrong.
        line: the binding's script.
        origin: its origin in the user's code.
        deviation: of this value, see :func:`bridge.verify.inputs.deviation`.
        what: the error in words.
    """

    binding: str
    op: str
    line: str
    origin: Origin
    deviation: float
    what: str

    def __str__(self) -> str:
        lines = [f"{self.op} ({self.binding}): {self.what}; off by {self.deviation:.1e}", f"  {self.line}"]
        return "\n".join([*lines, *([f"  from {self.origin}"] if str(self.origin) else [])])


def first_wrong_node(
    lowered: LoweredCall, graph: InterpretedRun, stage: InterpretedRun, allowed: float
) -> Culprit | None:
    """The first ATen node whose value differs from all variables imported from it."""
    candidates: dict[str, list[Any]] = {}
    lines = {
        var.name: (binding_line(var, value), short_op(value)) for var, value in bindings(lowered["imported"].function)
    }
    for name in lines:
        candidates.setdefault(name.split("__")[0], []).append(stage.values[name])
    for node, wanted in graph.values.items():
        found = [v for v in candidates.get(node, []) if isinstance(v, torch.Tensor)]
        if not isinstance(wanted, torch.Tensor) or not found:
            continue
        off = min(deviation(value, wanted) for value in found)
        if off > allowed:
            last = [name for name in lines if name.split("__")[0] == node][-1]
            origin = lowered.origin(node)
            what = f"imported from {origin.aten}, whose value it does not have"
            return Culprit(last, lines[last][1], lines[last][0], origin, off, what)
    return None


def first_difference(
    lowered: LoweredCall, function: Function, before: Mapping[str, Any], after: Mapping[str, Any], allowed: float
) -> Culprit | None:
    """The first variable of ``function`` that differs between two runs."""
    fresh: list[str] = []
    for var, value in bindings(function):
        name = var.name
        old, new = before.get(name), after[name]
        if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor) or old.shape != new.shape:
            fresh.append(name)
            continue
        off = deviation(new, old, scale=_scale(value, after))
        if off > allowed:
            behind = [source for source in fresh if source in _behind(function, name)]
            what = "had another value one stage earlier"
            what += f"; new since then: {', '.join(behind)}" if behind else ""
            return Culprit(name, short_op(value), binding_line(var, value), lowered.origin(name), off, what)
    return None


def _scale(value: Expr, values: Mapping[str, Any]) -> float:
    """The largest element of a binding's inputs: a sum of them that is zero up to rounding is noise."""
    read = [values.get(used.name) for used in used_vars(value)]
    return largest([tensor for tensor in read if isinstance(tensor, torch.Tensor)])


def _behind(function: Function, name: str) -> set[str]:
    """Names of all variables that a variable depends on."""
    sources = {var.name: [used.name for used in used_vars(value)] for var, value in bindings(function)}
    found: set[str] = set()
    stack = [name]
    while stack:
        for source in sources.get(stack.pop(), ()):
            if source not in found:
                found.add(source)
                stack.append(source)
    return found


def first_wrong_gradient(lowered: LoweredCall, forward: InterpretedRun, allowed: float, *, seed: int) -> Culprit | None:
    """The operator nearest to the outputs whose gradient rule differs from torch's derivative at the run's values."""
    function = lowered["forward"].function
    generator = torch.Generator().manual_seed(seed)
    for var, value in reversed(list(bindings(function))):
        if not isinstance(value, Call) or op_name(value) == "relax.grad.no_grad":
            continue
        off = _gradient_deviation(var, value, forward, generator)
        if off is not None and off > allowed:
            origin = lowered.origin(var.name)
            what = "its gradient rule does not give torch's derivative"
            return Culprit(var.name, short_op(value), binding_line(var, value), origin, off, what)
    return None


def _gradient_deviation(var: Var, value: Call, forward: InterpretedRun, generator: torch.Generator) -> float | None:
    """Deviation of a rule's derivatives from autograd's; ``None`` if one of the two has none."""
    params = [used for used in used_vars(value) if isinstance(used.ty, TensorType)]
    wanted = [index for index, param in enumerate(params) if is_float(param)]
    if not wanted or len(params) != len(used_vars(value)):
        return None
    single, outputs = _single(var, value, params)
    if not outputs:
        return None
    try:
        joint = autodiff.differentiate(single, outputs, wanted)
    except autodiff.UndifferentiableOp:
        return None
    inputs = [forward.values[param.name].detach() for param in params]
    with torch.enable_grad():
        leaves = [x.clone().requires_grad_(index in wanted) for index, x in enumerate(inputs)]
        made = interpret(single, leaves).results
    seeded = [(position, made[position]) for position in outputs if made[position].requires_grad]
    if len(seeded) != len(outputs):
        return None
    grads = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y) for _, y in seeded]
    theirs = torch.autograd.grad([y for _, y in seeded], [leaves[i] for i in wanted], grads, allow_unused=True)
    with torch.no_grad():
        ours = interpret(joint, [*inputs, *grads]).results[len(results(single)) :]
    theirs = [torch.zeros_like(mine) if their is None else their for mine, their in zip(ours, theirs, strict=True)]
    scale = largest(theirs)
    return max(deviation(mine, their, scale=scale) for mine, their in zip(ours, theirs, strict=True))


def _single(var: Var, value: Call, params: Sequence[Var]) -> tuple[Function, list[int]]:
    """The function of one binding, and the places of its floating point results."""
    if not isinstance(var.ty, TupleType):
        return build_function(params, [(var, value)], [var]), [0] if is_float(var) else []
    fields = [(Var(f"field_{index}", ty), TupleGetItem(var, index)) for index, ty in enumerate(var.ty.fields)]
    function = build_function(params, [(var, value), *fields], [field for field, _ in fields])
    # The second result of a library function is for its own backward only: autodiff.library.
    return function, [index for index, (field, _) in enumerate(fields[:1]) if is_float(field)]


def compiled_on(device: torch.device, function: Function, name: str) -> Program:
    """Compiles a function for a device, with current options."""
    target = None if device == HOST else str(device)
    return compile_function(function, name=name, options=CompileOptions.current(backend_for(target)))


def first_wrong_kernel(
    lowered: LoweredCall, function: Function, inputs: Sequence[torch.Tensor], reference: InterpretedRun, allowed: float
) -> Culprit | None:
    """The first variable whose compiled value differs from the interpreter's."""
    shown = [(var, value) for var, value in bindings(function) if isinstance(var.ty, TensorType)]
    everything = build_function(function.params, list(bindings(function)), [var for var, _ in shown])
    program = compiled_on(lowered.captured.device, everything, f"{lowered.captured.module_name}_every_variable")
    for (var, value), found in zip(shown, program(list(inputs)), strict=True):
        wanted = reference.values[var.name]
        off = deviation(found, wanted, scale=_scale(value, reference.values))
        if off > allowed:
            what = "compiled code does not compute what its operator means"
            return Culprit(var.name, short_op(value), binding_line(var, value), lowered.origin(var.name), off, what)
    return None
