"""``lowered.check()``: a lowered call → every stage compared with autograd; a float64 rerun identifies rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autodiff.ir import Function, TensorType, bindings
from bridge.base.devices import default_device_of_forward, working_for
from bridge.base.errors import CompilationError, UnsupportedModule
from bridge.base.modes import autocast_to
from bridge.base.torch_internals import pytree
from bridge.lowering import Foldable, LoweredCall
from bridge.reference import InterpretedRun, interpret, interpret_graph
from bridge.verify.inputs import (
    Culprit,
    Reference,
    backward_inputs,
    compiled_on,
    copied,
    deviation,
    eager_reference,
    first_difference,
    first_wrong_gradient,
    first_wrong_kernel,
    first_wrong_node,
    largest,
    sample_of,
    tolerance,
    torchs_gradients,
)

AGREES, ROUNDING, DEVIATES = "agrees", "rounding", "deviates"
BEFORE = {"masked": "imported", "spelled": "masked", "forward": "spelled", "joint": "forward", "cleaned": "joint"}
BEFORE |= {"split forward": "cleaned", "split backward": "cleaned"}
"""Stage made by a pass → the pass's input stage."""


@dataclass(frozen=True)
class StageCheck:
    """One stage, compared with eager.

    Attributes:
        name: the stage; ``compiled forward`` and ``compiled backward`` follow the lowering's own.
        deviations: dtype → largest difference from eager's results and gradients, relative to each tensor's largest
            element.
        worst: the result with that difference.
        verdict: ``"agrees"``, ``"rounding"`` (a difference that vanishes in float64) or ``"deviates"``.
        culprit: the wrong operation, if it was found.
    """

    name: str
    deviations: dict[str, float]
    worst: str
    verdict: str
    culprit: Culprit | None = None


@dataclass(frozen=True)
class Check(Foldable):
    """The result of :func:`check`; ``print`` it.

    Attributes:
        module_name: class of the module.
        stages: the compared stages, in order.
        allowed: dtype → largest deviation explained by rounding.
        notes: omitted comparisons, with reasons.
    """

    module_name: str
    stages: tuple[StageCheck, ...]
    allowed: dict[str, float]
    notes: tuple[str, ...] = ()

    @property
    def first(self) -> StageCheck | None:
        """The first stage that deviates by more than rounding."""
        return next((stage for stage in self.stages if stage.verdict == DEVIATES), None)

    @property
    def ok(self) -> bool:
        """Whether no stage deviates by more than rounding."""
        return self.first is None

    def __str__(self) -> str:
        kinds = list(self.stages[0].deviations)
        lines = [f"{self.module_name}: {self.headline()}", f"  {'stage':<18}" + "".join(f"{k:>10}" for k in kinds)]
        for stage in self.stages:
            numbers = "".join(f"{stage.deviations[kind]:>10.1e}" for kind in kinds)
            lines.append(f"  {stage.name:<18}{numbers}  {stage.verdict}, worst: {stage.worst}")
        limits = "".join(f"{self.allowed[kind]:>10.0e}" for kind in kinds)
        lines.append(f"  {'rounding explains':<18}{limits}")
        if self.first is not None and self.first.culprit is not None:
            lines.append(str(self.first.culprit))
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    __repr__ = __str__

    def headline(self) -> str:
        """The verdict in a line."""
        if self.first is not None:
            return f"stage '{self.first.name}' is the first that deviates from autograd"
        rounded = sum(stage.verdict == ROUNDING for stage in self.stages)
        return "every stage agrees with autograd" + (f" ({rounded} of them up to rounding)" if rounded else "")


@dataclass
class Trace:
    """All stages of one lowering, run on its sample.

    Attributes:
        lowered: the lowered call.
        reference: eager's results.
        runs: stage → the interpreter's run.
        found: stage → results and gradients (``None``: the stage has none), compiled stages included.
        inputs: stage → its inputs.
        allowed: largest deviation explained by rounding.
        notes: omitted comparisons, with reasons.
    """

    lowered: LoweredCall
    reference: Reference
    allowed: float
    runs: dict[str, InterpretedRun] = field(default_factory=dict)
    found: dict[str, tuple[list[torch.Tensor] | None, list[torch.Tensor] | None]] = field(default_factory=dict)
    inputs: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def deviations(self, stage: str) -> tuple[float, str]:
        """The stage's largest deviation from eager, and the result with it."""
        results, gradients = self.found[stage]
        worst, where = 0.0, "all results"
        for found, wanted, names in (
            (results, self.reference.results, self._result_names()),
            (gradients, self.reference.gradients, self._gradient_names()),
        ):
            if found is None:
                continue
            scale = largest(wanted)
            for mine, theirs, name in zip(found[: len(names)], wanted, names, strict=True):  # checks are not eager's
                off = deviation(mine, theirs, scale=scale)
                if off > worst:
                    worst, where = off, name
        return worst, where

    def _result_names(self) -> list[str]:
        captured = self.lowered.captured
        outputs = [f"output {index}" for index in range(self.lowered.imported.num_outputs)]
        return outputs + [f"new {captured.input_name(index)}" for index, _ in captured.mutated]

    def _gradient_names(self) -> list[str]:
        params = [param.name for param in self.lowered["imported"].function.params]
        owned = [spec.name for spec in self.lowered.captured.module_tensors]
        names = owned + params[len(owned) :]
        return [f"gradient of {names[index]}" for index in self.lowered.wanted]


def trace(lowered: LoweredCall, *, seed: int) -> Trace:
    """Runs every stage, and the compiled programs, on the sample. ``ValueError`` as :func:`check`."""
    reference = eager_reference(lowered, seed=seed)
    with working_for(lowered.captured.device), autocast_to(None):  # autocast's casts are nodes of the graph
        return _trace(Trace(lowered, reference, tolerance(_float_types(lowered))))


def _trace(made: Trace) -> Trace:
    """Interprets every stage, and runs the compiled programs; each backward gets its own forward's saved tensors."""
    lowered, reference = made.lowered, made.reference
    count = lowered.num_results
    _trace_captured(made)
    with torch.no_grad():
        for name in ("imported", "masked", "spelled", "forward"):
            run = _interpret(made, name, lowered[name].function, reference.primals)
            made.found[name] = (run.results, None)
        if lowered.plan is None:
            made.found["compiled forward"] = (_compiled(lowered, lowered.forward, reference.primals), None)
            made.inputs["compiled forward"] = reference.primals
            return made
        for name in ("joint", "cleaned"):
            run = _interpret(made, name, lowered[name].function, reference.primals + reference.grad_outs)
            made.found[name] = (run.results[:count], run.results[count:])
        forward = _interpret(made, "split forward", lowered.forward, reference.primals)
        made.found["split forward"] = (forward.results[:count], None)
        saved = backward_inputs(lowered, reference, forward.results)
        backward = _interpret(made, "split backward", lowered.backward, saved)
        made.found["split backward"] = (None, backward.results)
        compiled = _compiled(lowered, lowered.forward, reference.primals)
        made.inputs["compiled forward"] = reference.primals
        made.found["compiled forward"] = (compiled[:count], None)
        made.inputs["compiled backward"] = backward_inputs(lowered, reference, compiled)
        made.found["compiled backward"] = (None, _compiled(lowered, lowered.backward, made.inputs["compiled backward"]))
    return made


def _trace_captured(made: Trace) -> None:
    """Runs the traced graph: its results, and torch's own gradients through it."""
    lowered, reference = made.lowered, made.reference
    wanted = set(lowered.wanted)
    with torch.set_grad_enabled(bool(wanted)):
        leaves = [x.clone().requires_grad_(i in wanted) for i, x in enumerate(reference.primals)]
        run = interpret_graph(lowered.captured, lowered.imported, leaves)
    gradients = None
    if wanted:
        try:
            gradients = torchs_gradients(lowered, run.results, leaves, reference.grad_outs)
        except RuntimeError as error:  # a functional operator that eager never calls may lack a derivative
            made.notes.append(f"captured: only its results are compared, torch cannot differentiate the graph: {error}")
    made.runs["captured"] = run
    made.found["captured"] = ([result.detach() for result in run.results], gradients)
    made.inputs["captured"] = reference.primals


def _interpret(made: Trace, name: str, function: Function, inputs: Sequence[torch.Tensor]) -> InterpretedRun:
    made.inputs[name] = list(inputs)
    made.runs[name] = interpret(function, inputs)
    return made.runs[name]


def _compiled(lowered: LoweredCall, function: Function, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return compiled_on(lowered.captured.device, function, f"{lowered.captured.module_name}_checked")(list(inputs))


def _float_types(lowered: LoweredCall) -> set[torch.dtype]:
    names = {
        str(var.ty.dtype)
        for var, _ in bindings(lowered["imported"].function)
        if isinstance(var.ty, TensorType) and "float" in str(var.ty.dtype)
    }
    names |= {str(p.ty.dtype) for p in lowered["imported"].function.params if "float" in str(p.ty.dtype)}
    return {getattr(torch, name) for name in names}


def in_dtype(lowered: LoweredCall, dtype: torch.dtype) -> LoweredCall:
    """Lowers the same call of a copy of the module in another floating dtype, with the same strategy.

    Raises:
        ValueError: the module cannot be copied, or does not run in that dtype.
    """
    sample = copied(sample_of(lowered))
    if any(tensor.is_complex() for tensor in (*sample.module.parameters(), *sample.module.buffers())):
        raise ValueError(f"{type(sample.module).__name__} holds complex numbers, which .to({dtype}) makes real")
    module = sample.module.to(dtype)

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
            return leaf
        return leaf.detach().to(dtype).requires_grad_(leaf.requires_grad)

    args, kwargs = pytree.tree_map(convert, (sample.args, sample.kwargs))
    try:
        with (
            working_for(lowered.captured.device),
            autocast_to(sample.autocast),
            torch.set_grad_enabled(lowered.plan is not None),
        ):
            return sample.relower(module, args, sample_kwargs=kwargs, partition=sample.partition)
    except (UnsupportedModule, CompilationError, RuntimeError, TypeError) as error:
        first = str(error).splitlines()[0]
        raise ValueError(f"{type(module).__name__} does not lower in {dtype}: {first}") from error


@default_device_of_forward()
def check(lowered: LoweredCall, *, dtype: torch.dtype | None = None, seed: int = 0) -> Check:
    """Runs every stage on the sample and compares it with eager's results and autograd's gradients.

    A stage *deviates* if the difference remains in float64, or if only the compiled code differs, not the same function
    run operator by operator in the same dtype. A difference that vanishes in float64 is *rounding*.

    Args:
        lowered: a result of :func:`bridge.lower`, with a sample.
        dtype: check in this floating dtype only, on a copy of the module; by default in the module's own dtype and, to
            separate rounding from errors, in float64.
        seed: for random draws and grad_outs.

    Raises:
        ValueError: there is no sample, the module has changed since it was lowered, it cannot be copied, or it does not
            run in ``dtype``.
    """
    notes: list[str] = []
    if dtype is not None:
        traces = [trace(in_dtype(lowered, dtype), seed=seed)]
        names = [str(dtype).removeprefix("torch.")]
    else:
        traces, names = [trace(lowered, seed=seed)], [_own_type(lowered)]
        if names != ["float64"]:
            try:
                traces.append(trace(in_dtype(lowered, torch.float64), seed=seed))
                names.append("float64")
            except ValueError as error:
                notes.append(f"no float64 rerun, so rounding and error are not told apart: {error}")
    if len(traces) > 1 and traces[-1].allowed > tolerance([torch.float64]):
        notes.append(
            f"the module computes in a narrower type inside, also in float64: compared to {traces[-1].allowed:.0e}"
        )
    return _judge(lowered, traces, names, tuple(notes), seed)


def _own_type(lowered: LoweredCall) -> str:
    types = sorted(_float_types(lowered), key=lambda kind: torch.finfo(kind).bits)
    return str(types[0]).removeprefix("torch.") if types else "integers"


def _judge(lowered: LoweredCall, traces: list[Trace], names: list[str], notes: tuple[str, ...], seed: int) -> Check:
    """Traces, the most exact dtype last → verdicts, with a culprit for the first stage that deviates."""
    exact = traces[-1]
    stages: list[StageCheck] = []
    for name in exact.found:
        measured = [made.deviations(name) for made in traces]
        verdict, source = AGREES, exact
        if measured[-1][0] > exact.allowed:
            verdict = DEVIATES
        elif measured[0][0] > traces[0].allowed:
            verdict, source = _narrow_verdict(name, traces[0]), traces[0]
        culprit = None
        if verdict == DEVIATES and all(stage.verdict != DEVIATES for stage in stages):
            culprit = find_culprit(source, name, seed)
        numbers = {kind: off for kind, (off, _) in zip(names, measured, strict=True)}
        worst = max(measured)[1] if verdict != DEVIATES or source is not exact else measured[-1][1]
        stages.append(StageCheck(name, numbers, worst, verdict, culprit))
    notes = tuple(dict.fromkeys((*notes, *(note for made in traces for note in made.notes))))
    allowed = {kind: made.allowed for kind, made in zip(names, traces, strict=True)}
    return Check(lowered.captured.module_name, tuple(stages), allowed, notes)


def _narrow_verdict(name: str, made: Trace) -> str:
    """Verdict on a deviation that vanishes in float64: rounding, unless only the compiled code has it.

    Compiled code has kernels per dtype, so float64 does not test them: they must not differ if the interpreter agrees.
    """
    interpreted = {"compiled forward": "split forward", "compiled backward": "split backward"}.get(name)
    if interpreted is None or interpreted not in made.found:
        return ROUNDING
    return ROUNDING if made.deviations(interpreted)[0] > made.allowed else DEVIATES


def find_culprit(made: Trace, stage: str, seed: int) -> Culprit | None:
    """The operation that makes a stage deviate, or ``None`` if it was not found."""
    lowered, runs, allowed = made.lowered, made.runs, made.allowed
    finders: dict[str, Callable[[], Culprit | None]] = {
        "captured": lambda: None,
        "imported": lambda: first_wrong_node(lowered, runs["captured"], runs["imported"], allowed),
        "joint": lambda: first_wrong_gradient(lowered, runs["forward"], allowed, seed=seed),
        "compiled forward": lambda: _wrong_kernel(made, "forward"),
        "compiled backward": lambda: _wrong_kernel(made, "backward"),
    }
    if stage in finders:
        return finders[stage]()
    before, after = runs[BEFORE[stage]].values, runs[stage].values
    return first_difference(lowered, lowered[stage].function, before, after, allowed)


def _wrong_kernel(made: Trace, direction: str) -> Culprit | None:
    function = made.lowered.forward if direction == "forward" else made.lowered.backward
    inputs = made.inputs[f"compiled {direction}"]
    with torch.no_grad():
        return first_wrong_kernel(made.lowered, function, inputs, interpret(function, inputs), made.allowed)
