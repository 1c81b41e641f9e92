"""Call plan: a lowered call, its compiled forward and its guard → the steps of a call, in order, as data that prints.

A step prints as one line with its tensors: module tensors and arguments by the user's names, draws and values by their
names in the lowered functions. An entry runs the steps, bound by :mod:`bridge.dispatch.call_run`, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from bridge.base.devices import HOST
from bridge.base.torch_internals import pytree
from bridge.capture import Counter, Draw, Output, PreCallExpression
from bridge.compile import Program
from bridge.dispatch.eager_backward import saved_apart
from bridge.dispatch.guards import EntryGuard
from bridge.dispatch.recompute import Observed
from bridge.dispatch.results import result_layouts
from bridge.lowering import LoweredCall

__all__ = ["STEPS", "Backward", "CallStep", "Checks", "Derive", "Forward", "Generator", "Inputs", "MakeDraws"]
__all__ += ["ReadNumbers", "Relayout", "Results", "Save", "SetAttributes", "WriteBack", "input_names"]
__all__ += ["plan_call"]


@dataclass(frozen=True)
class CallStep:
    """One step of a call."""

    kind: ClassVar[str]

    def __str__(self) -> str:
        return f"{self.kind:<11} {self.text()}"

    def text(self) -> str:
        """The step in words, without its kind."""
        raise NotImplementedError


@dataclass(frozen=True)
class Inputs(CallStep):
    """The guard returns the programs' input tensors.

    Attributes:
        names: module tensors, numbers, arguments.
        numbers: the names that are Python numbers of the module or among the arguments, passed as 0-d float64 tensors.
        strided: the names that the program reads through a contiguous copy, since the sample's tensor was strided.
    """

    kind = "inputs"
    names: tuple[str, ...]
    numbers: tuple[str, ...] = ()
    strided: tuple[str, ...] = ()

    def text(self) -> str:
        return _parts(_list(self.names), numbers=self.numbers, **{"made dense": self.strided})


@dataclass(frozen=True)
class Derive(CallStep):
    """Derivatives that forward takes: turns ``requires_grad`` of arguments on, as forward does. A call whose
    derivatives lead out of it runs eager.

    Attributes:
        derived: places of the inputs with respect to which forward takes derivatives.
        followed: places of the arguments that require grad from then on.
        names: of both.
    """

    kind = "derive"
    derived: tuple[int, ...]
    followed: tuple[int, ...]
    names: tuple[tuple[str, ...], tuple[str, ...]]

    def text(self) -> str:
        return _parts(f"with respect to {_list(self.names[0])}", **{"requires grad from now on": self.names[1]})


@dataclass(frozen=True)
class MakeDraws(CallStep):
    """Draws random numbers from torch's generator.

    Attributes:
        draws: eager's draws, in its order.
        masks: places of the dropout masks.
        used: places of the draws that are program inputs, in the program's order; ``names``: their names there.
        undone: whether to keep the generator's state, in case the call falls back to eager.
        computed: places of the recomputed dropout masks, for which the programs get the generator's state.
        device: the program's device.
    """

    kind = "draws"
    draws: tuple[Draw, ...]
    masks: tuple[int, ...]
    used: tuple[int, ...]
    names: tuple[str, ...]
    undone: bool
    computed: tuple[int, ...] = ()
    device: torch.device = HOST

    def text(self) -> str:
        name_of = dict(zip(self.used, self.names, strict=True))
        first = next((place for place, draw in enumerate(self.draws) if draw.is_computed), len(self.draws))
        made = [
            f"{name_of.get(place, 'unused')} = "
            f"{'the state for ' * (place in self.computed or draw.is_placed)}{_draw(draw)}"
            for place, draw in enumerate(self.draws[:first])
        ]
        if first < len(self.draws):
            inside = _list(f"{_draw(draw)}" for draw in self.draws[first:])
            made.append(f"{name_of.get(first, 'unused')} = the generator's state, for {inside} in the program")
        return _list(made) + ("; undone if the call turns out to be eager's" if self.undone else "")


@dataclass(frozen=True)
class Forward(CallStep):
    """The forward program: inputs, draws → outputs, new buffer values, generator state, broken check, saved tensors."""

    kind = "forward"
    program: str
    inputs: tuple[str, ...]
    results: tuple[str, ...]

    def text(self) -> str:
        return f"{self.program}({_list(self.inputs)}) -> {_list(self.results)}"


@dataclass(frozen=True)
class Checks(CallStep):
    """Scalar guards after the program: numbers that forward reads equal the sample's, or the call falls back to eager.

    Attributes:
        result: place of the program's result with the number of the first failed check, from 1 on; 0: none failed.
        checks: description of each number, and the sample's value.
    """

    kind = "checks"
    result: int
    checks: tuple[tuple[str, str], ...]

    def text(self) -> str:
        return _list(": ".join(check).partition(", called with")[0] for check in self.checks)


@dataclass(frozen=True)
class ReadNumbers(CallStep):
    """Pre-call guard expressions: numbers that forward reads, computed from the inputs; no match: an eager call."""

    kind = "numbers"
    read: tuple[PreCallExpression, ...]

    @property
    def counts(self) -> bool:
        """Whether some of the numbers are dynamic sizes."""
        return any(each.sizes for each in self.read)

    def text(self) -> str:
        return _list(f"{each.field}: {each.words}" for each in self.read)


@dataclass(frozen=True)
class Relayout(CallStep):
    """Copies results to eager's strides, or out of shared memory.

    Attributes:
        results: place, name and strides of each; ``None``: a plain copy.
    """

    kind = "layout"
    results: tuple[tuple[int, str, tuple[int, ...] | None], ...]

    def text(self) -> str:
        return _list(f"{name} {f'strided {s}' if s else 'copied'}" for _, name, s in self.results)


@dataclass(frozen=True)
class Generator(CallStep):
    """Sets the generator to the state after the program's own draws; an eager call if its state changed meanwhile.

    Attributes:
        before, after: places of the generator's state among the program's inputs and results.
    """

    kind = "generator"
    before: int
    after: int

    def text(self) -> str:
        return "the state that the program's draws leave"


@dataclass(frozen=True)
class Save(CallStep):
    """Collects the saved tensors: primals, then outputs, then intermediates.

    Attributes:
        primals: places of saved inputs and draws.
        copied: indices into ``primals`` of tensors saved as copies: buffers that the call changes, and tensors that
            eager does not save.
        outputs: places of saved outputs.
        saved_tensors: the first saved intermediate among the results; all later results are saved.
        names: of all saved tensors.
        aliased: indices into ``primals`` + ``outputs`` of tensors saved as detached aliases: outputs, and inputs of
            which eager saves views (:func:`saved_apart`).
        left: (index into ``primals`` + ``outputs``, input) if the input's memory has that value in the end: the input
            is saved.
        beside: places of extra inputs and draws for a backward by eager's operators.
        beside_names: their names; ``beside_copied``: indices of buffers among them that the call changes;
            ``beside_followed``: indices of arguments among them that require grad.
        watched: places of inputs that eager saves and this backward does not read; ``watched_outputs``: of outputs.
            If one of them has been written in place, the backward raises, as eager's does.
        again: places of inputs that functions in checkpoints read. If one of them has been written or has other memory,
            the backward raises: eager's would run these functions on the new numbers.
    """

    kind = "save"
    primals: tuple[int, ...]
    copied: tuple[int, ...]
    outputs: tuple[int, ...]
    saved_tensors: int
    names: tuple[str, ...]
    aliased: tuple[int, ...] = ()
    left: tuple[tuple[int, int], ...] = ()
    beside: tuple[int, ...] = ()
    beside_names: tuple[str, ...] = ()
    beside_copied: tuple[int, ...] = ()
    beside_followed: tuple[int, ...] = ()
    watched: tuple[int, ...] = ()
    watched_outputs: tuple[int, ...] = ()
    again: tuple[int, ...] = ()

    def text(self) -> str:
        copies = tuple(self.names[place] for place in self.copied)
        return _parts(_list(self.names), **{"copies of": copies, "for a second derivative": self.beside_names})


@dataclass(frozen=True)
class WriteBack(CallStep):
    """Writes new values into buffers and inputs that eager changes in place.

    Attributes:
        buffers: place among the inputs, place of the new value among the results, name.
        counted: places among the inputs where eager's write bumps the version
            (:attr:`bridge.capture.Observation.counted`).
    """

    kind = "write back"
    buffers: tuple[tuple[int, int, str], ...]
    counted: frozenset[int]

    def text(self) -> str:
        return _list(name for *_, name in self.buffers)


@dataclass(frozen=True)
class Results(CallStep):
    """Builds the module's result: computed tensors, constants, views of inputs and results.

    Attributes:
        outputs: metadata of its leaves.
        computed: place of each leaf among the computed tensors; ``None`` for a constant or a view.
        spec: its pytree structure.
        inputs: names of the inputs that a leaf may be a view of.
    """

    kind = "results"
    outputs: tuple[Output, ...]
    computed: tuple[int | None, ...]
    spec: pytree.TreeSpec
    inputs: tuple[str, ...]

    def text(self) -> str:
        return _list(map(self._leaf, self.outputs, self.computed))

    def _leaf(self, output: Output, place: int | None) -> str:
        if not output.is_tensor:
            return repr(output.value)
        if place is not None:
            return f"output {place}"
        source, index = output.alias_of
        base = self.inputs[index] if source == "input" else f"result {index}"
        return base if output.is_same_object else f"view {output.shape} of {base}"


@dataclass(frozen=True)
class SetAttributes(CallStep):
    """Updates Python attributes that forward counts up or sets.

    Attributes:
        counters: the counters, with their increments.
        kept: names of the attributes that get the results after the module's own.
    """

    kind = "attributes"
    counters: tuple[Counter, ...]
    kept: tuple[str, ...] = ()

    def text(self) -> str:
        counted = (f"{f'{each.path}.{each.name}'.strip('.')} += {each.step}" for each in self.counters)
        return _list([*counted, *(f"{name} anew" for name in self.kept)])


@dataclass(frozen=True)
class Backward(CallStep):
    """The backward program, run by autograd: saved tensors and grad_outs → gradients.

    Attributes:
        grad_outs: places of the outputs with a grad_out.
        gradients: names of the inputs that get a gradient.
        copied: places of gradients to clone, since their memory is shared.
        absent: places, among all inputs that require grad, without a gradient in eager for these grad_outs.
        nodes: if there are several autograd nodes, the names of each node's gradients, in the order of execution.
    """

    kind = "backward"
    program: str
    grad_outs: tuple[int, ...]
    gradients: tuple[str, ...]
    copied: tuple[int, ...]
    absent: tuple[int, ...]
    nodes: tuple[tuple[str, ...], ...] = ()

    def text(self) -> str:
        given = _list(["saved", *(f"grad_out of output {place}" for place in self.grad_outs)])
        if self.nodes:
            told = " | ".join(map(_list, self.nodes))
            return f"{self.program}({given}) -> gradients by {len(self.nodes)} autograd nodes: {told}"
        return f"{self.program}({given}) -> gradients of {_list(self.gradients)}"


STEPS: tuple[type[CallStep], ...] = tuple(CallStep.__subclasses__())


def _list(names: Iterable[str]) -> str:
    return ", ".join(names) or "nothing"


def _parts(first: str, **others: tuple[str, ...]) -> str:
    return "; ".join([first, *(f"{title}: {_list(names)}" for title, names in others.items() if names)])


def _draw(draw: Draw) -> str:
    extents = "x".join(map(str, draw.shape)) or "scalar"
    given = ", ".join(repr(arg) for arg in draw.args if isinstance(arg, bool | int | float))
    return f"{draw.op.split('.')[1]}{f'({given})' if given else ''} of {extents}"


def plan_call(
    lowered: LoweredCall, programs: Any, guard: EntryGuard, observed: Observed | None = None
) -> tuple[CallStep, ...]:
    """The steps of a call, from the guard to the module's result, without idle ones.

    Args:
        programs: the compiled :class:`bridge.dispatch.programs.Programs`.
        observed: with dynamic shapes, draws and results for the call's sizes.
    """
    forward, masks, eager = programs.forward.program, programs.masks, programs.eager_backward
    captured, imported = lowered.captured, lowered.imported
    observed = observed or Observed(tuple(captured.draws), tuple(captured.outputs))
    inputs = input_names(lowered)
    draws = lowered.parameter_names[len(inputs) :]
    values = _result_names(lowered)
    numbers = [place.name or f"argument {place.leaf}" for place in guard.numbers]
    strided = [
        name
        for name, fake in zip(inputs[len(captured.module_tensors) :], captured.given.tensors, strict=False)
        if not fake.is_contiguous()
    ]
    found: list[CallStep] = [Inputs(inputs, tuple(numbers), tuple(strided))]
    if captured.numbers.expressions:
        found.append(ReadNumbers(captured.numbers.expressions))
    if captured.given.followed or captured.observation.derived:
        first = len(inputs) - len(captured.given.tensors)
        places = tuple(sorted(captured.observation.derived)), tuple(sorted(first + n for n in captured.given.followed))
        found.append(Derive(*places, tuple(tuple(inputs[place] for place in some) for some in places)))
    can_fail = bool(imported.checks) or imported.leaves_state or forward.can_fail
    if observed.draws:
        used = imported.input_draws + imported.dropout_draws
        computed = () if masks is None else tuple(masks.draws)
        found.append(
            MakeDraws(observed.draws, imported.dropout_draws, used, draws, can_fail, computed, captured.device)
        )
    name = f"{captured.module_name}_forward"
    given = inputs[len(captured.module_tensors) :] if programs.is_frozen else inputs
    found.append(Forward(name, given + draws, values))
    if imported.checks:
        found.append(Checks(lowered.num_results - 1, imported.checks))
    found += _relayout(lowered, forward, observed, values)
    first_buffer = imported.num_outputs
    if imported.leaves_state:
        before = len(inputs) + len(imported.input_draws) - 1
        found.append(Generator(before, first_buffer + len(captured.mutated)))
    if lowered.differentiable:
        found.append(_save(lowered, inputs + draws, values, () if eager is None else eager.held))
    if captured.mutated:
        places = enumerate((index for index, _ in captured.mutated), first_buffer)
        written = tuple((index, result, inputs[index]) for result, index in places)
        found.append(WriteBack(written, captured.observation.counted & {index for index, *_ in written}))
    spec = captured.observation.out_spec
    found.append(Results(observed.outputs, imported.output_of, spec, inputs))
    if guard.tree.sets_attributes:
        found.append(SetAttributes(captured.state.counters, tuple(each.name for each in captured.state.kept)))
    return tuple(found)


def _relayout(lowered: LoweredCall, forward: Program, observed: Observed, values: Sequence[str]) -> list[Relayout]:
    """The step that lays results out as eager does, if some are laid out otherwise."""
    seen = forward.shared_results(), forward.result_strides
    layouts = result_layouts(observed.outputs, lowered.imported.output_of, *seen)
    return [Relayout(tuple((place, values[place], stride) for place, stride in layouts))] * bool(layouts)


def input_names(lowered: LoweredCall) -> tuple[str, ...]:
    """The user's names of module tensors and argument tensors."""
    captured = lowered.captured
    return tuple(map(captured.input_name, range(len(captured.module_tensors) + len(captured.given.tensors))))


def _result_names(lowered: LoweredCall) -> tuple[str, ...]:
    def names() -> Iterator[str]:
        captured, imported = lowered.captured, lowered.imported
        yield from (f"output {place}" for place in range(imported.num_outputs))
        yield from (f"new {captured.input_name(index)}" for index, _ in captured.mutated)
        yield from ["the generator's state"] * imported.leaves_state
        yield from ["the place of a broken check"] * bool(imported.checks)
        yield from lowered.capture_names

    return tuple(names())


def _save(lowered: LoweredCall, primals: Sequence[str], values: Sequence[str], beside: Sequence[int]) -> Save:
    """Plans the saved tensors of a call: which to copy, to detach, to hold and to watch."""
    plan, captured = lowered.plan, lowered.captured
    changed = {index for index, _ in captured.mutated}
    apart, aliased = saved_apart(captured)
    memory = {lowered.imported.num_outputs + place: index for place, index in captured.left.items()}
    saved, outputs = tuple(plan.saved_primals), tuple(plan.saved_outputs)
    names = (
        [primals[index] for index in saved] + [values[index] for index in outputs] + [*values[lowered.num_results :]]
    )
    aliased_outputs = (  # a saved output that is not detached costs autograd more, and tells it nothing more
        len(saved) + place for place, index in enumerate(outputs) if memory.get(index) in (None, *aliased)
    )
    leaves = {index for index, each in enumerate(captured.module_tensors) if each.kind == "parameter"}
    return Save(
        saved,
        tuple(place for place, index in enumerate(saved) if index in changed or index in apart),
        outputs,
        lowered.num_results,
        tuple(names),
        (*(place for place, index in enumerate(saved) if index in aliased and index not in changed), *aliased_outputs),
        tuple((len(saved) + place, memory[index]) for place, index in enumerate(outputs) if index in memory),
        tuple(beside),
        tuple(primals[index] for index in beside),
        tuple(place for place, index in enumerate(beside) if index in changed and index not in beside[:place]),
        tuple(place for place, index in enumerate(beside) if index in lowered.wanted and index not in leaves),
        tuple(sorted(captured.watched[0] - {*saved})),
        tuple(sorted({lowered.imported.output_of[leaf] for leaf in captured.watched[1]} - {None, *outputs})),
        tuple(sorted(captured.observation.checkpointed)),
    )
