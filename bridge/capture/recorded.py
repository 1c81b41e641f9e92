"""Captured call from a record: a module's real and fake run → :class:`bridge.capture.captured.Captured`.

Passes turn the record into a functional ATen graph; the user's code does not run again.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from bridge.base.devices import current_device
from bridge.base.errors import Unsupported, UnsupportedModule, line_of
from bridge.base.log import channel
from bridge.base.modes import autocast_to
from bridge.base.threads import raise_deferred
from bridge.base.torch_fakes import clear_fake_memo
from bridge.base.torch_internals import pytree
from bridge.capture.autograd_uses import written_and_read
from bridge.capture.captured import (
    Captured,
    CapturedArguments,
    CapturedLoop,
    CapturedNames,
    CapturedNumbers,
    CapturedSizes,
    CapturedState,
)
from bridge.capture.distributed import collective_problems
from bridge.capture.draws import match_draws
from bridge.capture.fake_run import FakeRecord
from bridge.capture.functional import FunctionalGraph, NotFunctional, drop_unused, functional_graph
from bridge.capture.loops.lengths import LoopedCall, comparable, run_of_any_length
from bridge.capture.observation import Observation
from bridge.capture.passes.stop_gradient import link_functions, mark_overwritten, prepare
from bridge.capture.precall_guards import recomputed, too_many, uncounted, varies
from bridge.capture.real_run import RealRun
from bridge.capture.replaced_functions import functions_of_torch
from bridge.capture.replay import fakes_of
from bridge.capture.rows import Record, form_of
from bridge.capture.sample import DynamicDim
from bridge.capture.select_at import spell_selections
from bridge.capture.steady_call import SteadyCall
from bridge.capture.symbolic_capture import recorded_with_extents
from bridge.capture.thread_isolation import quiet
from bridge.capture.training_graph import TrainingGraph, training_graph
from bridge.state import tensor_problem

__all__ = ["captured_of", "captured_of_any_length"]

log = channel("dispatch")


def captured_of(
    module: nn.Module, args: tuple, kwargs: dict[str, Any], dims: Sequence[DynamicDim], call: SteadyCall
) -> Captured:
    """Captures a steady call from its runs; ``dims``: dimensions of arguments whose sizes become extents."""
    captured = _captured(module, args, kwargs, call.real, call.fake, call.problems)
    if dims:
        captured = recorded_with_extents(captured, dims, call.real, call.fake, args, kwargs)
    return captured


def captured_of_any_length(
    module: nn.Module, args: tuple, kwargs: dict[str, Any], dims: Sequence[DynamicDim], call: LoopedCall
) -> Captured:
    """Captures a call whose loops have any length."""
    fake = run_of_any_length(call, args, kwargs, dims)
    captured = captured_of(module, args, kwargs, dims, SteadyCall(call.real, fake, (), []))
    return replace(captured, loop=CapturedLoop(True, call.form, call.any_length))


def _captured(module, args, kwargs, real: RealRun, fake: FakeRecord, problems: list[Unsupported]) -> Captured:
    name = type(module).__name__
    observation, record = real.observation, real.record
    observation.unsupported += [*problems, *_free(real), *collective_problems(record)]
    if observation.unsupported:
        raise UnsupportedModule(name, _explained(observation))
    rolls = real.loops is not None and fake.symbols is None
    counts = None if fake.symbols is None else fake.symbols.counts
    counted = {} if counts is None else dict(enumerate(counts.fakes, len(record.forms)))
    record, made = _traced(real, fake, rolls, counted, _input_names(module, args, kwargs, real))
    observation.unsupported += spell_selections(made.graph)
    observation.unsupported += _prepared(made.graph, record, real, made.placeholders)
    functional = _functional(made, name, observation)
    draw_of, unmatched = match_draws(functional.drawing, record.rows, observation.draws, f"{name}.forward")
    if not observation.unsupported:
        observation.unsupported += unmatched
    index_of = {number: index for index, number in enumerate([*real.order, *counted])}
    bound = {name: index_of[place] for name, place in made.placeholders.items()}
    count = len(real.results)
    replaced, read = functional.results[count : count + len(real.final)], functional.results[count + len(real.final) :]
    finals = zip([index_of[place] for place in real.final], replaced, strict=True)
    mutated = [*((bound[name], node) for name, node in functional.written.items()), *finals]
    owned_names = [tensor.names[0] for tensor in real.given.tensors]
    observation.unsupported += written_and_read(observation.checkpointed, [index for index, _ in mutated], owned_names)
    functional.graph.output((*(node for _, node in mutated), *functional.results[:count], *read))
    drop_unused(functional.graph)
    readings = tuple(each.reading for each in record.reads)
    observation.unsupported += too_many(record.reads, read, bound)
    sizes = [() if counts is None else counts.of(place) for place in range(len(readings))]
    conditions, read = recomputed(
        functional.graph, read, readings, real.given.tensors, bound, made.literals, sizes, len(real.order)
    )
    observation.unsupported += uncounted(read, readings, sizes, fake.symbols is not None and counts is None)
    present = {node.name for node in functional.graph.nodes}
    by_draws = tuple(place for place, node in enumerate(read) if varies(node, draw_of, made.literals))
    captured = Captured(
        module_name=name,
        graph=functional.graph,
        names=CapturedNames(bound, {node: draw for node, draw in draw_of.items() if node in present}, made.literals),
        module_tensors=tuple(real.given.tensors),
        given=CapturedArguments(
            (*fake.arguments, *counted.values()),
            tuple(real.given.constants),
            tuple(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves((args, kwargs))),
            real.given.in_spec,
        ),
        results=tuple(functional.results[:count]),
        mutated=tuple(mutated),
        observation=observation,
        state=CapturedState(kept=() if real.kept is None else tuple(real.kept.places)),
        numbers=CapturedNumbers(readings, conditions, by_draws),
        read=read,
        sizes=CapturedSizes(counted=len(counted)),
        loop=CapturedLoop(rolls, comparable(real) if rolls else None),
        device=current_device(),
    )
    clear_fake_memo(fake.mode)
    return captured


def _functional(made: TrainingGraph, name: str, observation: Observation) -> FunctionalGraph:
    """The functional form of a training graph."""
    raise_deferred()
    with autocast_to(None), quiet(), functions_of_torch():  # its casts are in the graph by now
        functional = functional_graph(made)
    if isinstance(functional, NotFunctional):
        log.debug("%s cannot be run on fake tensors", name, exc_info=functional.cause)
        raise UnsupportedModule(name, observation.unsupported or [functional.problem], cause=functional.cause)
    raise_deferred()
    return functional


def _traced(
    real: RealRun, fake: FakeRecord, rolls: bool, counted: dict[int, torch.Tensor], names: Iterable[str]
) -> tuple[Record, TrainingGraph]:
    """The rows of both runs as one record, and its training graph."""
    record, fakes = real.record, fake.record.fakes
    behind, names = len(real.order) - len(fake.arguments), dict(enumerate(names))
    order = real.order[:behind], [*real.order[behind:], *counted]
    results = [*fake.results, *real.final.values(), *(each.numbers for each in record.reads)]
    if rolls:
        record, results = real.loops.record, real.loops.results
        fakes = fakes_of(record, fake.mode, fakes, range(len(real.record.forms), len(record.forms)))
    elif fake.symbols is None:
        fakes = fakes_of(record, fake.mode, fakes, range(len(record.forms)))
    else:  # rows with symbolic sizes, which are equal otherwise
        forms = [*record.forms, *map(form_of, counted.values())]
        record = replace(record, rows=fake.record.rows, same=fake.record.same, forms=forms)
        fakes = {**fakes, **counted}
        names |= {number: f"count_{place}" for place, number in enumerate(counted)}
    return record, training_graph(record, fakes, fake.mode, names, order, results, torch.is_grad_enabled())


def _prepared(graph: fx.Graph, record: Record, real: RealRun, placeholders: dict[str, int]) -> list[Unsupported]:
    """Rewrites a training graph so that nothing in it depends on grad modes → refusals."""

    def needs_grad(node: fx.Node) -> bool:
        return node.name in placeholders and record.forms[placeholders[node.name]].requires_grad

    problems = [*real.functions.problems]
    if real.functions.uses:
        problems += link_functions(graph, real.functions.uses)
    problems += prepare(graph, needs_grad)
    overwritten = {real.order[index] for index in real.observation.overwritten}
    mark_overwritten(graph, [name for name, number in placeholders.items() if number in overwritten])
    return problems


def _explained(observation: Observation) -> list[Unsupported]:
    """The refusals to report. If forward runs a backward, one refusal that names the derivative replaces them, because
    its formulas read values inside of operators."""
    problems = observation.unsupported
    named = [each for each in problems if each.op.startswith("torch.autograd.grad")]
    if not observation.differentiates or named:
        return named or problems
    reason = "a derivative inside forward whose formula reads what no operator of forward's gave"
    hint = "dispatch the submodules whose derivatives forward does not take, or leave this module to PyTorch"
    return [Unsupported("torch.autograd.grad or backward inside forward", problems[0].where, reason, hint)]


def _free(real: RealRun) -> list[Unsupported]:
    """Refusals of free tensors that could be replaced by others without a guard seeing it."""
    found, reads = [], real.observation.reads
    for tensor, index in real.record.free.values():
        problem = tensor_problem(tensor)
        if problem is None and reads.knows(tensor) and id(tensor) not in reads.tensors.hidden:
            continue
        where = real.record.rows[index].where if index < len(real.record.rows) else None
        found.append(
            Unsupported(
                f"free tensor of shape {list(tensor.shape)}",
                "forward" if where is None else line_of(where),
                problem or "a tensor that is no parameter, buffer or attribute of a module, and that no name leads to",
                "register it: self.register_buffer(...), nn.ParameterList, nn.ModuleList",
            )
        )
    return found


def _input_names(module: nn.Module, args: tuple, kwargs: dict[str, Any], real: RealRun) -> list[str]:
    """A name for each input of the run: torch.export's name of its placeholder."""
    prefixes = {"parameter": "p_", "buffer": "b_"}
    found = [prefixes[each.kind] + _word(each.names[0]) for each in real.given.tensors[: len(real.given.real_tensors)]]
    signature = inspect.signature(module.forward)
    spec = real.given.in_spec
    positional, keywords = spec.children()
    given = list(signature.parameters.values())
    words: list[str] = []
    for index in range(positional.num_children):
        plain = index < len(given) and given[index].kind is not inspect.Parameter.VAR_POSITIONAL
        variadic = next((each.name for each in given if each.kind is inspect.Parameter.VAR_POSITIONAL), "args")
        first = next((k for k, each in enumerate(given) if each.kind is inspect.Parameter.VAR_POSITIONAL), len(given))
        root = given[index].name if index < first and plain else f"{variadic}_{index - first}"
        words += [_word(root + rest) for rest in _paths(positional.children()[index])]
    for key, child in zip(keywords.context, keywords.children(), strict=True):
        words += [_word(str(key) + rest) for rest in _paths(child)]
    leaves = pytree.tree_leaves((args, kwargs))
    found += [word for word, leaf in zip(words, leaves, strict=True) if isinstance(leaf, torch.Tensor)]
    return found + ["c_" + _word(path) for path in real.given.attributes]


def _paths(spec: pytree.TreeSpec) -> list[str]:
    if spec.is_leaf():
        return [""]
    found = []
    keys = spec.context if isinstance(spec.context, list) and len(spec.context) == spec.num_children else None
    for index, child in enumerate(spec.children()):
        key = index if keys is None else keys[index]
        found += [f"_{key}{rest}" for rest in _paths(child)]
    return found


def _word(text: str) -> str:
    return re.sub(r"[^a-zA-Z0-9]", "_", text).lower()
