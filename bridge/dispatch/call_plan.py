"""Call plan: a lowered call, its compiled forward and its guard → the steps that a call takes, in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bridge.compile import Program
from bridge.dispatch import call_steps as steps
from bridge.dispatch.guards import EntryGuard
from bridge.dispatch.held import saved_apart
from bridge.dispatch.observed import Observed
from bridge.dispatch.results import result_layouts
from bridge.lowering import LoweredCall

__all__ = ["input_names", "plan_call"]


def plan_call(
    lowered: LoweredCall,
    forward: Program,
    guard: EntryGuard | None,
    observed: Observed | None = None,
    computed: Sequence[int] = (),
    frozen: bool = False,
    beside: Sequence[int] = (),
) -> tuple[steps.CallStep, ...]:
    """The steps from the guard to the module's result; what a call does not need is no step.

    Args:
        forward: the compiled forward.
        guard: ``None`` where somebody else gives the inputs.
        observed: draws and results of a call of certain sizes, where they vary.
        computed: places of the draws that are masks which the programs compute.
        frozen: whether the program has the module's tensors as constants.
        beside: places of inputs and draws that a call holds for :mod:`bridge.dispatch.eager_backward`.
    """
    captured, imported = lowered.captured, lowered.imported
    observed = observed or Observed(tuple(captured.draws), tuple(captured.outputs))
    inputs = input_names(lowered)
    draws = lowered.parameter_names[len(inputs) :]
    values = _result_names(lowered)
    numbers = [place.name or f"argument {place.leaf}" for place in guard.numbers] if guard is not None else []
    strided = [
        name
        for name, fake in zip(inputs[len(captured.module_tensors) :], captured.arguments, strict=False)
        if not fake.is_contiguous()
    ]
    found: list[steps.CallStep] = [steps.Inputs(inputs, tuple(numbers), tuple(strided))]
    if captured.recomputed:
        found.append(steps.ReadNumbers(captured.recomputed))
    can_fail = bool(imported.checks) or imported.leaves_state or forward.can_fail
    if observed.draws:
        used = imported.input_draws + imported.dropout_draws
        found.append(
            steps.MakeDraws(
                observed.draws, imported.dropout_draws, used, draws, can_fail, tuple(computed), captured.device
            )
        )
    name = f"{captured.module_name}_forward"
    given = inputs[len(captured.module_tensors) :] if frozen else inputs
    found.append(steps.Forward(name, given + draws, values))
    if imported.checks:
        found.append(steps.Checks(lowered.num_results - 1, imported.checks))
    seen = forward.shared_results(), forward.result_strides
    if layouts := result_layouts(observed.outputs, imported.output_of, *seen):
        found.append(steps.Relayout(tuple((place, values[place], stride) for place, stride in layouts)))
    first_buffer = imported.num_outputs
    if imported.leaves_state:
        before = len(inputs) + len(imported.input_draws) - 1
        found.append(steps.Generator(before, first_buffer + len(captured.mutated)))
    if lowered.differentiable:
        found.append(_save(lowered, inputs + draws, values, beside, guard))
    if captured.mutated:
        places = enumerate((index for index, _ in captured.mutated), first_buffer)
        written = tuple((index, result, inputs[index]) for result, index in places)
        found.append(steps.WriteBack(written, captured.observation.counted & {index for index, *_ in written}))
    spec = captured.observation.out_spec
    found.append(steps.Results(observed.outputs, imported.output_of, spec, inputs))
    if guard is not None and guard.sets_attributes:
        found.append(steps.SetAttributes(captured.counters, guard.derived, tuple(each.name for each in captured.kept)))
    return tuple(found)


def input_names(lowered: LoweredCall) -> tuple[str, ...]:
    """Names of module tensors and argument tensors, as the user has them."""
    captured = lowered.captured
    return tuple(map(captured.input_name, range(len(captured.module_tensors) + len(captured.arguments))))


def _result_names(lowered: LoweredCall) -> tuple[str, ...]:
    def names() -> Iterator[str]:
        captured, imported = lowered.captured, lowered.imported
        yield from (f"output {place}" for place in range(imported.num_outputs))
        yield from (f"new {captured.input_name(index)}" for index, _ in captured.mutated)
        yield from ["the generator's state"] * imported.leaves_state
        yield from ["the place of a broken check"] * bool(imported.checks)
        yield from lowered.capture_names

    return tuple(names())


def _save(
    lowered: LoweredCall, primals: Sequence[str], values: Sequence[str], beside: Sequence[int], guard: EntryGuard | None
) -> steps.Save:
    plan, changed = lowered.plan, {index for index, _ in lowered.captured.mutated}
    apart, aliased = saved_apart(lowered.captured)
    saved, outputs = tuple(plan.saved_primals), tuple(plan.saved_outputs)
    names = (
        [primals[index] for index in saved] + [values[index] for index in outputs] + [*values[lowered.num_results :]]
    )
    viewed = {lowered.imported.output_of[leaf] for leaf in lowered.captured.apart[1]}
    aliased_outputs = (len(saved) + place for place, index in enumerate(outputs) if index in viewed)
    owned = lowered.captured.module_tensors if guard is not None else ()  # of a guard, parameters are leaves
    leaves = {index for index, each in enumerate(owned) if each.kind == "parameter"}
    return steps.Save(
        saved,
        tuple(place for place, index in enumerate(saved) if index in changed or index in apart),
        outputs,
        lowered.num_results,
        tuple(names),
        (*(place for place, index in enumerate(saved) if index in aliased and index not in changed), *aliased_outputs),
        tuple(beside),
        tuple(primals[index] for index in beside),
        tuple(place for place, index in enumerate(beside) if index in changed),
        tuple(place for place, index in enumerate(beside) if index in lowered.wanted and index not in leaves),
    )
