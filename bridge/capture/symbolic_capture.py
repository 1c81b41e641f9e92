"""Symbolic capture: a captured call whose graph has torch's symbolic sizes → the same call with extents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from autodiff.extents import Dim, Extent, sample_of
from bridge.base.errors import Unsupported, UnsupportedModule
from bridge.base.pytrees import is_plain, tensor_leaves
from bridge.base.tensor_properties import offset_in
from bridge.base.torch_fakes import clear_fake_memo, fake_mode
from bridge.base.torch_internals import pytree
from bridge.base.torch_shapes import SYMBOLIC, hint
from bridge.capture.captured import Captured
from bridge.capture.counted_dims import sized
from bridge.capture.observation import Draw, Observation, Output, Parameter
from bridge.capture.passes.alias_analysis import WHERE
from bridge.capture.sample import ALL_COUNTS
from bridge.capture.symbolic_sizes import NotTranslatedError, SymbolicSizes, at_sample

if TYPE_CHECKING:
    from bridge.capture.fake_run import FakeRecord
from bridge.capture.real_run import RealRun
from bridge.state import SampleCall

_NO_FORM = "a size that is no expression of the arguments' sizes"
_FIXED = "forward is for the sample's numbers alone"
_CONTIGUOUS = "call .contiguous() on it"


def recorded_with_extents(captured: Captured, call: SampleCall, real: RealRun, fake: FakeRecord) -> Captured:
    """The captured call of two runs with extents for all sizes; its graph is changed in place.

    ``captured.observation`` is that of ``real``.
    """
    eager, counted, counts = captured.observation, (), fake.symbols.counts
    dims = [each for each in call.dims if each is not ALL_COUNTS]
    if counts is not None:
        dims += counts.dims(len(fake.leaves))
        counted = tuple(counts.fakes)
    observation = replace(
        eager,
        draws=fake.symbols.draws,
        outputs=[_of_run(each, fake, place) for place, each in enumerate(eager.outputs)],
        out_spec=fake.out_spec,
    )
    sizes = SymbolicSizes(dims, [*fake.leaves, *counted])
    captured = _with_extents(replace(captured, observation=observation), sizes, call, fake.symbols.lines)
    if captured.problems:
        return captured
    observation, problems = strides_of_eager(captured.observation, eager)
    observation.unsupported += problems
    return replace(captured, observation=observation)


def _of_run(output: Output, fake: FakeRecord, place: int) -> Output:
    """Eager's metadata of a result, with the symbolic sizes of the fake run."""
    result = fake.results[place]
    if not output.is_tensor:
        return replace(output, value=result) if isinstance(result, SYMBOLIC) else output
    leaf = base = fake.record.fakes[result.number]
    if output.alias_of is not None:
        kind, index = output.alias_of
        base = fake.record.fakes[index if kind == "input" else fake.results[index].number]
    return replace(output, shape=tuple(leaf.shape), stride=leaf.stride(), offset=offset_in(leaf, base))


def _with_extents(captured: Captured, sizes: SymbolicSizes, call: SampleCall, asked: Mapping[int, str]) -> Captured:
    """The captured call with extents for all sizes; its graph is changed in place.

    Called when nothing evaluates torch's symbolic sizes any more. A size that extents cannot express is added to the
    problems. ``asked``: as in :meth:`bridge.capture.symbolic_sizes.SymbolicSizes.take_over`.
    """
    forward = f"{captured.module_name}.forward"
    observation = captured.observation
    observation.unsupported += sizes.take_over(forward, asked)
    if sizes.environment is None:
        return captured
    for node in captured.graph.nodes:
        try:
            if "val" in node.meta:
                node.meta["val"] = sizes.form(node.meta["val"])
        except NotTranslatedError as error:
            where = node.meta.get(WHERE, forward)
            observation.unsupported.append(Unsupported(str(node.target), where, f"{_NO_FORM}: {error}"))
    try:
        observation = sizes.observation(observation)
    except NotTranslatedError as error:
        observation.unsupported.append(Unsupported("a result or a draw", forward, f"{_NO_FORM}: {error}"))
    values = {**dict(enumerate(pytree.tree_leaves((call.args, call.kwargs)))), **sizes.arguments}
    forms = [sizes.form(value) for value in values.values() if isinstance(value, torch.Tensor)]
    counted = captured.given.tensors[len(captured.given.tensors) - captured.sizes.counted :]
    tensors = _arguments_of_sample(call, counted, [each.requires_grad for each in captured.given.tensors])
    captured = replace(captured, observation=observation, given=captured.given._replace(tensors=tensors))
    if not sizes.scope.samples:  # forward has fixed them all
        if captured.sizes.counted:
            raise UnsupportedModule(captured.module_name, [Unsupported("counted sizes", forward, _FIXED)])
        return captured
    shapes, strides = tuple(form.shape for form in forms), tuple(form.stride for form in forms)
    found = captured.sizes._replace(scope=sizes.scope, shapes=shapes, strides=strides, lines=sizes.lines)
    return replace(captured, sizes=found)


def _arguments_of_sample(
    call: SampleCall, counted: Sequence[torch.Tensor], requires_grad: Sequence[bool]
) -> tuple[torch.Tensor, ...]:
    """Fake tensors with the sample's sizes: of the argument tensors, then of the counted ones."""
    mode = fake_mode(allow_non_fake_inputs=True)
    tensors = tensor_leaves((call.args, call.kwargs))
    tensors += [sized(hint(each.shape[0])) for each in counted]
    pairs = zip(tensors, requires_grad, strict=True)
    made = tuple(mode.from_tensor(leaf.detach()).requires_grad_(follows) for leaf, follows in pairs)
    clear_fake_memo(mode)
    return made


def strides_of_eager(symbolic: Observation, real: Observation) -> tuple[Observation, list[Unsupported]]:
    """An observation with extents → the same with eager's strides for draws and results, and refusals.

    An eager run gives strides for the sample only. Where the fake run's strides differ, eager's are used if they belong
    to a dense tensor, whose axes keep their order for other sizes.
    """
    problems = _hiding_sizes(symbolic, real)
    ours = [replace(each, stride=()) for each in at_sample(symbolic).draws]
    if ours != [replace(each, stride=()) for each in real.draws]:
        reason = f"eager draws {real.draws}; with symbolic sizes {symbolic.draws}"
        problems.append(Unsupported("random draws", "forward", reason))
    if problems:
        return symbolic, problems
    reason = "eager's strides {0.stride} for shape {0.shape} do not tell those of other sizes"
    outputs = [
        _laid_out(ours, ours.shape, eagers, problems, "strides", reason)
        for ours, eagers in zip(symbolic.outputs, real.outputs, strict=True)
    ]
    draws = []
    for ours, eagers in zip(symbolic.draws, real.draws, strict=True):
        ours = _laid_out(ours, ours.shape, eagers, problems, "strides", reason)
        draws.append(_draw_of_eager(ours, eagers, problems))
    return replace(symbolic, draws=draws, outputs=outputs), problems


def _draw_of_eager(ours: Draw, eagers: Draw, problems: list[Unsupported]) -> Draw:
    """A draw with the strides of eager's parameters and operand, which decide which element gets which number."""
    reason = "the strides {0.stride} of a parameter do not tell those of other sizes"
    args = [
        _laid_out(one, one.shape, other, problems, ours.op, reason) if isinstance(one, Parameter) else one
        for one, other in zip(ours.args, eagers.args, strict=True)
    ]
    advance, operand, eagers_operand = ours.advance, ours.operand, eagers.operand
    if advance is not None and sample_of(advance) != eagers.advance:
        advance = None
    if operand is not None:
        reason = "where eager's dropout reads does not tell where it does for other sizes"
        place = eagers_operand.of, eagers_operand.offset
        operand = _laid_out(operand, ours.shape, eagers_operand, problems, ours.op, reason)
        if place == (None, 0) != (operand.of, sample_of(operand.offset)):
            operand = replace(eagers_operand, stride=operand.stride)
        elif place != (operand.of, sample_of(operand.offset)):
            problems.append(Unsupported(ours.op, "forward", reason, _CONTIGUOUS))
    return replace(ours, args=tuple(args), advance=advance, operand=operand)


def _laid_out(ours: Any, shape: Sequence[Dim], eagers: Any, problems: list[Unsupported], op: str, reason: str) -> Any:
    """A draw, a result or a part of one with eager's strides; else a refusal, whose ``reason`` may name ``eagers``."""
    stride = _stride(shape, ours.stride, eagers.stride)
    if stride is None:
        problems.append(Unsupported(op, "forward", reason.format(eagers), _CONTIGUOUS))
        return ours
    return replace(ours, stride=stride)


def _hiding_sizes(symbolic: Observation, real: Observation) -> list[Unsupported]:
    """Refusals of opaque results that may hold a size: equal to eager's on the sample does not mean equal for all."""
    reason = "may hold a size, which varies"
    found = [
        Unsupported(f"result {index}, a {type(ours.value).__name__}", "forward", reason, "return the size by itself")
        for index, (ours, eagers) in enumerate(zip(symbolic.outputs, real.outputs, strict=False))
        if not (ours.is_tensor or isinstance(ours.value, Extent) or is_plain(ours.value) or ours.value is eagers.value)
    ]
    if _holds_size(symbolic.out_spec):
        found.append(Unsupported("the result's structure", "forward", reason, "return the size by itself"))
    return found


def _holds_size(part: Any) -> bool:
    """Whether a pytree structure, or the context of one of its nodes, holds a symbolic number."""
    if isinstance(part, pytree.TreeSpec):
        return _holds_size(part.context) or any(map(_holds_size, part.children()))
    if isinstance(part, dict):
        return any(map(_holds_size, part.values()))
    if isinstance(part, slice):
        return any(map(_holds_size, (part.start, part.stop, part.step)))
    return isinstance(part, SYMBOLIC) or (isinstance(part, list | tuple | set) and any(map(_holds_size, part)))


def _stride(shape: Sequence[Dim], traced: Sequence[Dim], eagers: Sequence[int]) -> tuple[Dim, ...] | None:
    if tuple(map(sample_of, traced)) == tuple(eagers):
        return tuple(traced)
    found: dict[int, Dim] = {}
    step: Dim = 1
    for axis in sorted(range(len(shape)), key=lambda axis: (eagers[axis], sample_of(shape[axis]), -axis)):
        found[axis] = step
        step = step * shape[axis]
    stride = tuple(found[axis] for axis in range(len(shape)))
    return stride if tuple(map(sample_of, stride)) == tuple(eagers) else None
