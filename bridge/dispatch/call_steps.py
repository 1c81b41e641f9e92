"""Call steps: a lowered and compiled call → what each call of its entry does, in order, as frozen data that prints.

One line per step, with the tensors that it touches: module tensors and arguments by name, draws and values by the names
that they have in the lowered functions. :mod:`bridge.dispatch.call_run` binds the steps to functions, and an entry runs
these and nothing else.

Call plan: a lowered call, its compiled forward and its guard → the steps that a call takes, in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

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

__all__ = ["STEPS", "Backward", "CallStep", "Checks", "Forward", "Generator", "Inputs", "MakeDraws", "ReadNumbers"]
__all__ += ["Relayout", "Results", "Save", "SetAttributes", "WriteBack", "input_names", "plan_call"]


@dataclass(frozen=True)
class CallStep:
    """One step of a call."""

    kind: ClassVar[str]

    def __str__(self) -> str:
        return f"{self.kind:<11} {self.text()}"

    def text(self) -> str:
        """What it does, without the name of its kind."""
        raise NotImplementedError


@dataclass(frozen=True)
class Inputs(CallStep):
    """The guard gives the tensors that the programs read.

    Attributes:
        names: module tensors, numbers, arguments.
        numbers: those of them that are Python numbers of the module or among the arguments, made 0-d float64 tensors.
        strided: those that the program reads through a dense copy, since the sample's are not.
    """

    kind = "inputs"
    names: tuple[str, ...]
    numbers: tuple[str, ...] = ()
    strided: tuple[str, ...] = ()

    def text(self) -> str:
        return _parts(_list(self.names), numbers=self.numbers, **{"made dense": self.strided})


@dataclass(frozen=True)
class MakeDraws(CallStep):
    """Random numbers from torch's generator.

    Attributes:
        draws: eager's, in its order.
        masks: places of those that are dropout masks.
        used: places of those that the program takes, in its order, and ``names``: what it calls them.
        undone: whether the generator's state is kept, for a call that turns out to be eager's.
        computed: places of those that are masks which the programs compute, from the generator's state.
        device: of the program.
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
    """The forward program: inputs and draws → outputs, new values of buffers, what is for us, captures."""

    kind = "forward"
    program: str
    inputs: tuple[str, ...]
    results: tuple[str, ...]

    def text(self) -> str:
        return f"{self.program}({_list(self.inputs)}) -> {_list(self.results)}"


@dataclass(frozen=True)
class Checks(CallStep):
    """Numbers that forward reads are the sample's, or the call is eager's.

    Attributes:
        result: the program's result that says which is not, from 1 on; 0 if all are.
        checks: what is looked at, and what was found.
    """

    kind = "checks"
    result: int
    checks: tuple[tuple[str, str], ...]

    def text(self) -> str:
        return _list(": ".join(check).partition(", called with")[0] for check in self.checks)


@dataclass(frozen=True)
class ReadNumbers(CallStep):
    """Numbers that forward reads, computed from the inputs before all else: as compiled, or the call is eager's."""

    kind = "numbers"
    read: tuple[PreCallExpression, ...]

    @property
    def counts(self) -> bool:
        """Whether some of them are sizes that vary."""
        return any(each.sizes for each in self.read)

    def text(self) -> str:
        return _list(f"{each.field}: {each.words}" for each in self.read)


@dataclass(frozen=True)
class Relayout(CallStep):
    """Results in eager's strides, or in memory of their own.

    Attributes:
        results: place, name and strides of each; ``None``: a copy as it is, of what others can see.
    """

    kind = "layout"
    results: tuple[tuple[int, str, tuple[int, ...] | None], ...]

    def text(self) -> str:
        return _list(f"{name} {f'strided {s}' if s else 'copied'}" for _, name, s in self.results)


@dataclass(frozen=True)
class Generator(CallStep):
    """The generator moves to the state that the program's own draws leave; the call is eager's if it was moved before.

    Attributes:
        before: the program's input that is the state before; ``after``: its result that is the state after.
    """

    kind = "generator"
    before: int
    after: int

    def text(self) -> str:
        return "the state that the program's draws leave"


@dataclass(frozen=True)
class Save(CallStep):
    """What the backward reads, for autograd to save.

    Attributes:
        primals: places of inputs and draws.
        copied: which of them are copied, by their place in ``primals``: buffers that the call changes, and what eager
            does not save.
        outputs: places of outputs.
        captures: the first capture among the results; all from there on are saved.
        names: of all that is saved.
        aliased: by their places among ``primals`` and ``outputs``, those that are another tensor in the same memory.
        left: places among these of what an input has in its memory in the end, each with that input, which is saved.
        beside: places of inputs and draws that are held beside, for a backward by eager's operators.
        beside_names: of these; ``beside_copied``: which are buffers that the call changes, by their place there,
            and ``beside_followed``: which are arguments that autograd follows.
        watched: places of inputs that eager's autograd saves and this backward does not read; ``watched_outputs``: of
            outputs. Where one has been written in place by then, the backward raises, as eager's does.
    """

    kind = "save"
    primals: tuple[int, ...]
    copied: tuple[int, ...]
    outputs: tuple[int, ...]
    captures: int
    names: tuple[str, ...]
    aliased: tuple[int, ...] = ()
    left: tuple[tuple[int, int], ...] = ()
    beside: tuple[int, ...] = ()
    beside_names: tuple[str, ...] = ()
    beside_copied: tuple[int, ...] = ()
    beside_followed: tuple[int, ...] = ()
    watched: tuple[int, ...] = ()
    watched_outputs: tuple[int, ...] = ()

    def text(self) -> str:
        copies = tuple(self.names[place] for place in self.copied)
        return _parts(_list(self.names), **{"copies of": copies, "for a second derivative": self.beside_names})


@dataclass(frozen=True)
class WriteBack(CallStep):
    """Buffers get their new values, as eager did in place.

    Attributes:
        buffers: place among the inputs, place of the new value among the results, name.
        counted: those places among the inputs where eager's write counts for autograd
            (:attr:`bridge.capture.Observation.counted`).
    """

    kind = "write back"
    buffers: tuple[tuple[int, int, str], ...]
    counted: frozenset[int]

    def text(self) -> str:
        return _list(name for *_, name in self.buffers)


@dataclass(frozen=True)
class Results(CallStep):
    """The module's result, in its structure: computed tensors, constants, views of what the caller has.

    Attributes:
        outputs: its leaves as they were observed.
        computed: of each its place among the computed tensors; ``None`` for a constant or a view.
        spec: its structure.
        inputs: names of what a leaf may be a view of.
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
    """Python state that forward counts up or sets.

    Attributes:
        counters: with what a call adds.
        kept: names of the places that get the results behind the module's own.
    """

    kind = "attributes"
    counters: tuple[Counter, ...]
    kept: tuple[str, ...] = ()

    def text(self) -> str:
        counted = (f"{f'{each.path}.{each.name}'.strip('.')} += {each.step}" for each in self.counters)
        return _list([*counted, *(f"{name} anew" for name in self.kept)])


@dataclass(frozen=True)
class Backward(CallStep):
    """The backward program, when autograd calls it: what was saved and grad_outs → gradients.

    Attributes:
        grad_outs: places of the outputs that got one.
        gradients: names of the inputs that get a gradient.
        copied: places of gradients in memory that others can see.
        absent: places, among all inputs that require one, at which eager has none for these grad_outs.
        nodes: where several autograd nodes hand out the gradients as they are computed, the names of each one's, in
            the order in which they run.
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
"""Every kind of step."""


def _list(names: Iterable[str]) -> str:
    return ", ".join(names) or "nothing"


def _parts(first: str, **others: tuple[str, ...]) -> str:
    return "; ".join([first, *(f"{title}: {_list(names)}" for title, names in others.items() if names)])


def _draw(draw: Draw) -> str:
    extents = "x".join(map(str, draw.shape)) or "scalar"
    given = ", ".join(repr(arg) for arg in draw.args if isinstance(arg, bool | int | float))
    return f"{draw.op.split('.')[1]}{f'({given})' if given else ''} of {extents}"


def plan_call(
    lowered: LoweredCall,
    forward: Program,
    guard: EntryGuard | None,
    observed: Observed | None = None,
    computed: Sequence[int] = (),
    frozen: bool = False,
    beside: Sequence[int] = (),
) -> tuple[CallStep, ...]:
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
    found: list[CallStep] = [Inputs(inputs, tuple(numbers), tuple(strided))]
    if captured.recomputed:
        found.append(ReadNumbers(captured.recomputed))
    can_fail = bool(imported.checks) or imported.leaves_state or forward.can_fail
    if observed.draws:
        used = imported.input_draws + imported.dropout_draws
        found.append(
            MakeDraws(observed.draws, imported.dropout_draws, used, draws, can_fail, tuple(computed), captured.device)
        )
    name = f"{captured.module_name}_forward"
    given = inputs[len(captured.module_tensors) :] if frozen else inputs
    found.append(Forward(name, given + draws, values))
    if imported.checks:
        found.append(Checks(lowered.num_results - 1, imported.checks))
    seen = forward.shared_results(), forward.result_strides
    if layouts := result_layouts(observed.outputs, imported.output_of, *seen):
        found.append(Relayout(tuple((place, values[place], stride) for place, stride in layouts)))
    first_buffer = imported.num_outputs
    if imported.leaves_state:
        before = len(inputs) + len(imported.input_draws) - 1
        found.append(Generator(before, first_buffer + len(captured.mutated)))
    if lowered.differentiable:
        found.append(_save(lowered, inputs + draws, values, beside, guard))
    if captured.mutated:
        places = enumerate((index for index, _ in captured.mutated), first_buffer)
        written = tuple((index, result, inputs[index]) for result, index in places)
        found.append(WriteBack(written, captured.observation.counted & {index for index, *_ in written}))
    spec = captured.observation.out_spec
    found.append(Results(observed.outputs, imported.output_of, spec, inputs))
    if guard is not None and guard.tree.sets_attributes:
        found.append(SetAttributes(captured.counters, tuple(each.name for each in captured.kept)))
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
) -> Save:
    plan, captured = lowered.plan, lowered.captured
    changed = {index for index, _ in captured.mutated}
    apart, aliased = saved_apart(captured)
    memory = {lowered.imported.num_outputs + place: index for place, index in captured.left.items()}
    saved, outputs = tuple(plan.saved_primals), tuple(plan.saved_outputs)
    names = (
        [primals[index] for index in saved] + [values[index] for index in outputs] + [*values[lowered.num_results :]]
    )
    viewed = {lowered.imported.output_of[leaf] for leaf in captured.apart[1]}
    viewed |= {place for place, index in memory.items() if index in aliased}
    aliased_outputs = (len(saved) + place for place, index in enumerate(outputs) if index in viewed)
    owned = captured.module_tensors if guard is not None else ()  # of a guard, parameters are leaves
    leaves = {index for index, each in enumerate(owned) if each.kind == "parameter"}
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
    )
