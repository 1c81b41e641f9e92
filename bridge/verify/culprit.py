"""Fault localization: a stage that deviates → the first wrong operation.

Passes preserve variables' names, so two stages are compared variable by variable; the first difference is the error.
Gradients have no counterpart in the previous stage: each operator's gradient rule is compared with autograd through
that operator alone. A compiled function is recompiled with all its variables as results (which changes none of them,
see :mod:`bridge.compile.schedule.fuse`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

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
from bridge.base.devices import HOST
from bridge.compile import CompileOptions, Program, backend_for, compile_function
from bridge.lowering import LoweredCall, Origin, binding_line, short_op
from bridge.reference import InterpretedRun, interpret
from bridge.verify.inputs import deviation, largest


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
