"""Recorded call: a module's sample call → its real and fake run, a key that equal calls share, its captured graph."""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import torch
from torch import fx

from autodiff.lazy import cached_property
from bridge.base.devices import current_device, working_for
from bridge.base.errors import Unsupported, UnsupportedModule, line_of
from bridge.base.log import channel
from bridge.base.modes import autocast_to
from bridge.base.pytrees import leaf_names
from bridge.base.tensor_properties import bits_of
from bridge.base.threads import raise_deferred
from bridge.base.torch_cuda import settle_attention_order
from bridge.base.torch_fakes import clear_fake_memo
from bridge.base.torch_internals import pytree
from bridge.base.torch_shapes import SYMBOLIC, conclusions, fixed
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
from bridge.capture.functional import FunctionalGraph, drop_unused, functional_graph
from bridge.capture.loops.lengths import LoopedCall, comparable, run_of_any_length
from bridge.capture.observation import Observation
from bridge.capture.passes.stop_gradient import link_functions, mark_overwritten, prepare
from bridge.capture.precall_guards import recomputed, too_many, uncounted, varies
from bridge.capture.real_run import RealRun
from bridge.capture.refusals import check_call, device_of_call
from bridge.capture.rows import Record, ValueRef, form_of, key_of
from bridge.capture.sample import refuse_numbers
from bridge.capture.select_at import spell_selections
from bridge.capture.steady_call import SteadyCall, steady_call
from bridge.capture.symbolic_capture import recorded_with_extents
from bridge.capture.symbolic_sizes import each_mapped
from bridge.capture.thread_isolation import functions_of_torch, quiet, recording
from bridge.capture.training_graph import TrainingGraph, training_graph
from bridge.capture.values import fakes_of
from bridge.state import SampleCall, tensor_problem


def record_call(call: SampleCall) -> RecordedCall:
    """Runs a call in the module's current mode, on real numbers and on fake tensors.

    Python attributes that forward sets once stay set; all other state is restored.

    Raises:
        UnsupportedModule: a compiled call cannot do exactly the same.
        Exception: eager's own, if PyTorch itself refuses the sample.
    """
    check_call(call)
    refuse_numbers(call.name, call.dims)
    device = device_of_call(call)
    settle_attention_order(device)
    with working_for(device), recording():
        return RecordedCall(call, steady_call(call))


def capture(call: SampleCall, looped: LoopedCall | None = None) -> Captured:
    """Records and captures a call (:func:`record_call`, then :meth:`RecordedCall.captured`).

    ``looped``: an existing run of it, with loops of any length.
    """
    if looped is None:
        return record_call(call).captured()
    with working_for(device_of_call(call)), recording():
        fake = run_of_any_length(looped, call)
    captured = RecordedCall(call, SteadyCall(looped.real, fake, (), [])).captured()
    return replace(captured, loop=CapturedLoop(True, looped.form, looped.any_length))


@dataclass
class RecordedCall:
    """A call and its runs (``steady``)."""

    call: SampleCall
    steady: SteadyCall

    @cached_property
    def key(self) -> tuple | None:
        """A key that is equal only for calls that compute the same; ``None`` if the record cannot tell that, or if the
        call has effects beyond its graph (counters, kept places, tensors outside of the module).

        With dynamic sizes, equal keys hold for all sizes that satisfy the conditions. Call it before :meth:`captured`.
        """
        real, fake = self.steady.real, self.steady.fake
        if self.steady.counters or self.steady.problems or real.kept:
            return None
        key = None if len(real.given.tensors) > len(real.given.real_tensors) else _observed_key(real)
        if key is None or fake.symbols is None:
            return key
        sizes = _key_of_sizes(fake)
        return None if sizes is None else (*key, sizes)

    @property
    def given(self) -> dict[str, Any]:
        """The fields of :class:`Captured` in which this call differs from an equal call that was lowered before."""
        real, fake = self.steady.real, self.steady.fake
        return {
            "module_name": self.call.name,
            "module_tensors": tuple(real.given.tensors),
            "given": CapturedArguments(
                tuple(fake.arguments),
                tuple(real.given.constants),
                tuple(isinstance(leaf, torch.Tensor) for leaf in self.call.leaves),
                real.given.in_spec,
                real.given.call.followed,
            ),
            "observation": real.observation,
            "numbers": CapturedNumbers(tuple(each.reading for each in real.record.reads)),
            "loop": CapturedLoop(recording=comparable(real) if real.loops is not None else None),
            "device": current_device(),
        }

    def captured(self) -> Captured:
        """The call as a functional graph.

        ``problems`` lists inexact parts of the graph; the import refuses them, and operators without conversion.
        """
        call, real, fake = self.call, self.steady.real, self.steady.fake
        with working_for(device_of_call(call)), recording():
            captured = _captured(call, self.given, real, fake, self.steady.problems)
            if call.dims:
                captured = recorded_with_extents(captured, call, real, fake)
        return replace(captured, state=captured.state._replace(counters=self.steady.counters))


# Record key: the record of a call → a digest by which calls are compared; equal keys are the same function.
#
# It covers the operators in order, their constants, the values that they read and make with their metadata, grad modes,
# draws and numbers written in the code. It leaves out lines and module paths: equal layers have equal keys.


def _observed_key(real: RealRun) -> tuple | None:
    """The key of a call's record and result; ``None`` if it cannot be compared with another call's."""
    observation = real.observation
    if observation.unsupported or observation.objects:
        return None
    outputs = tuple(each.key for each in observation.outputs)
    digest = _record_key(real.record, (*real.results, *sorted(real.final.items())))
    if digest is None or None in outputs:
        return None
    reads = tuple(each.reading.key for each in real.record.reads), observation.reads_validation
    drawn = hashlib.sha256(repr(observation.draws).encode()).hexdigest()  # rows do not name the kernels that drew
    # only a capture refuses inputs that the backward reads again: equal keys must agree on them
    again = tuple(sorted(observation.checkpointed)), tuple(sorted(observation.overwritten))
    return digest, outputs, observation.out_spec, reads, again, drawn


def _record_key(record: Record, results: Any) -> str | None:
    """The digest of a record; ``None`` if an operand is no plain constant."""
    made = hashlib.sha256()
    try:
        for row in record.rows:
            told = str(row.op), _plain((row.args, row.kwargs)), _plain(row.results), row.grad, row.draws
            made.update(repr(told).encode())
        made.update(repr(record.forms).encode())
        made.update(repr(_plain(results)).encode())
        for number, literal in record.literals.items():
            made.update(repr((number, literal.dtype, tuple(literal.shape), literal.device)).encode())
            made.update(bits_of(literal))
    except TypeError:
        return None
    return None if record.free else made.hexdigest()


def _key_of_sizes(fake: FakeRecord) -> str | None:
    """The digest of a run on symbolic sizes: its rows, layouts, results and draws with expressions, and its conditions.

    Symbols are named by the arguments' positions, so equal calls have equal expressions. Two calls with one digest run
    the same operators for all sizes that satisfy the conditions, and both have the conditions as guards. Call it before
    other queries add conditions to the environment. ``None`` if an operand is no plain constant.
    """
    record = fake.record
    told: list[Any] = [repr(each_mapped(each, fixed)) for each in fake.symbols.draws]  # with all fields
    try:
        told += [(str(row.op), _plain((row.args, row.kwargs, row.results))) for row in record.rows]
        told += [_plain(fake.results), str(fake.out_spec), sorted(record.same.items())]
    except TypeError:
        return None
    for number, each in sorted(record.fakes.items()):
        layout = (*each.shape, *each.stride(), each.storage_offset()) if each.layout is torch.strided else each.shape
        told.append((number, each.dim(), [str(fixed(size)) for size in layout]))
    told += [str(condition) for condition, _ in conclusions(fake.mode.shape_env)]
    return hashlib.sha256(repr(told).encode()).hexdigest()


def _plain(tree: Any) -> Any:
    return key_of(
        tree, (ValueRef, *SYMBOLIC), lambda each: each if type(each) is ValueRef else ("size", str(fixed(each)))
    )


# Captured call from a record: a module's real and fake run → :class:`bridge.capture.captured.Captured`.
#
# Passes turn the record into a functional ATen graph; the user's code does not run again.


log = channel("dispatch")


def _captured(
    call: SampleCall, given: dict[str, Any], real: RealRun, fake: FakeRecord, problems: list[Unsupported]
) -> Captured:
    """The captured call of two runs; ``given``: as :attr:`RecordedCall.given`."""
    name = call.name
    observation, record = real.observation, real.record
    observation.unsupported += [*problems, *_free(real), *collective_problems(record)]
    if observation.unsupported:
        raise UnsupportedModule(name, _explained(observation))
    rolls = real.loops is not None and fake.symbols is None
    counts = None if fake.symbols is None else fake.symbols.counts
    counted = {} if counts is None else dict(enumerate(counts.fakes, len(record.forms)))
    record, made = _traced(real, fake, rolls, counted, _input_names(call, real))
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
    readings = tuple(each.reading for each in record.reads)
    observation.unsupported += too_many(record.reads, read, bound)
    sizes = [() if counts is None else counts.of(place) for place in range(len(readings))]
    tensors, places = real.given.tensors, len(real.order)
    conditions, read, before = recomputed(read, readings, tensors, bound, made.literals, sizes, places)
    of_reads = [node for node in read if node is not None]
    functional.graph.output((*(node for _, node in mutated), *functional.results[:count], *of_reads))
    drop_unused(functional.graph, before)
    observation.unsupported += uncounted(read, readings, sizes, fake.symbols is not None and counts is None)
    present = {node.name for node in functional.graph.nodes}
    by_draws = tuple(place for place, node in enumerate(read) if varies(node, draw_of, made.literals))
    arguments = given["given"]
    captured = Captured(
        **given
        | {
            "given": arguments._replace(tensors=(*arguments.tensors, *counted.values())),
            "numbers": CapturedNumbers(readings, conditions, by_draws),
            "loop": CapturedLoop(rolls and real.loops.is_long, comparable(real) if rolls else None),
        },
        graph=functional.graph,
        names=CapturedNames(bound, {node: draw for node, draw in draw_of.items() if node in present}, made.literals),
        results=tuple(functional.results[:count]),
        mutated=tuple(mutated),
        state=CapturedState(kept=() if real.kept is None else tuple(real.kept.places)),
        read=read,
        sizes=CapturedSizes(counted=len(counted)),
    )
    clear_fake_memo(fake.mode)
    return captured


def _functional(made: TrainingGraph, name: str, observation: Observation) -> FunctionalGraph:
    """The functional form of a training graph."""
    raise_deferred()
    refusal = None
    try:
        with autocast_to(None), quiet(), functions_of_torch():  # its casts are in the graph by now
            functional = functional_graph(made)
    except UnsupportedModule as error:
        refusal = error
    if refusal is not None:
        log.debug("%s cannot be run on fake tensors", name, exc_info=refusal.cause)
        raise UnsupportedModule(name, observation.unsupported or refusal.ops, cause=refusal.cause)
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
    reason = "a derivative inside forward, whose formula reads values that operators have saved"
    hint = "dispatch the modules inside, whose derivatives forward may take: whole=False"
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
                line_of(where),
                problem or "a tensor that is no parameter, buffer or attribute of a module, and that no name leads to",
                "register it: self.register_buffer(...), nn.ParameterList, nn.ModuleList",
            )
        )
    return found


def _input_names(call: SampleCall, real: RealRun) -> list[str]:
    """A name for each input of the run: torch.export's name of its placeholder."""
    prefixes = {"parameter": "p_", "buffer": "b_"}
    found = [prefixes[each.kind] + _word(each.names[0]) for each in real.given.tensors[: len(real.given.real_tensors)]]
    signature = inspect.signature(call.module.forward)
    spec = real.given.in_spec
    positional, _ = spec.children()
    kinds = {each.name: each.kind for each in signature.parameters.values()}
    roots = list(takewhile(lambda name: kinds[name] is not inspect.Parameter.VAR_POSITIONAL, kinds))
    variadic = next(iter([*kinds][len(roots) :]), "args")
    roots += [f"{variadic}_{index}" for index in range(positional.num_children - len(roots))]
    words = []
    for path in leaf_names(spec):
        kind, key, *rest = re.findall(r"\w+", path)
        words.append(_word("_".join([roots[int(key)] if kind == "args" else key, *rest])))
    leaves = pytree.tree_leaves((call.args, call.kwargs))
    found += [word for word, leaf in zip(words, leaves, strict=True) if isinstance(leaf, torch.Tensor)]
    return found + ["c_" + _word(path) for path in real.given.attributes]


def _word(text: str) -> str:
    return re.sub(r"[^a-zA-Z0-9]", "_", text).lower()
