"""Recorded call: two runs of a module's sample call → what was captured.

The record is brought into a functional ATen graph by passes that work on the record alone; the user's code does not run
again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch._export.verifier import TrainingIRVerifier
from torch.export import ExportedProgram
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ConstantArgument,
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)

from bridge.base.devices import current_device
from bridge.base.errors import Unsupported, UnsupportedModule, line_of
from bridge.base.interrupts import raise_deferred
from bridge.base.modes import ambient_autocast, autocast_to
from bridge.base.pytrees import leaf_names
from bridge.base.torch_internals import pytree
from bridge.capture.captured import Captured
from bridge.capture.checkpoints import written_and_read
from bridge.capture.dynamic_shapes import DynamicDim
from bridge.capture.fake_run import forget_real_tensors
from bridge.capture.functional import functional_graph
from bridge.capture.inplace_rules import CHANGES_ARGUMENT
from bridge.capture.loops.rolled import spelled_out
from bridge.capture.passes.autocast import spell_out_casts, without_casts
from bridge.capture.passes.link_functions import link_functions
from bridge.capture.passes.stop_gradient import prepare
from bridge.capture.random_nodes import draws_by_origin, match_draws
from bridge.capture.recomputed import recomputed, uncounted
from bridge.capture.recorder import _autocast
from bridge.capture.select_at import spell_selections
from bridge.capture.steady_call import SteadyCall
from bridge.capture.symbolic_capture import recorded_with_extents
from bridge.capture.training_graph import TrainingGraph, training_graph
from bridge.capture.two_runs import FakeRecord, RealRun
from bridge.state import PythonState, tensor_problem

__all__ = ["captured_of"]


def captured_of(
    module: nn.Module, args: tuple, kwargs: dict[str, Any], dims: Sequence[DynamicDim], call: SteadyCall
) -> Captured:
    """The captured call of a recorded one; ``dims``: dimensions of arguments whose sizes become extents."""
    captured = _captured(module, args, kwargs, call.real, call.fake, call.problems)
    if dims:
        captured = recorded_with_extents(captured, dims, call.real, call.fake, args, kwargs)
    return captured


def _captured(module, args, kwargs, real: RealRun, fake: FakeRecord, problems: list[Unsupported]) -> Captured:
    name = type(module).__name__
    forward = f"{name}.forward"
    observation = real.observation
    observation.unsupported += problems
    observation.unsupported += _free(real)
    if observation.unsupported:
        raise UnsupportedModule(name, observation.unsupported)
    record, fakes = real.record, fake.record.fakes
    final = [*fake.results, *real.final.values(), *(each.numbers for each in record.reads)]
    rolls = real.loops is not None and fake.symbols is None
    if rolls:
        rolled = spelled_out(real.loops, record, fakes, fake.mode)
        record, fakes, final = rolled.record, rolled.fakes, rolled.results
    tensors = real.tensors
    names = _input_names(module, args, kwargs, real)
    ambient = torch.is_grad_enabled(), _autocast()
    if fake.symbols is not None:  # rows with symbolic sizes, which are equal otherwise
        record = replace(record, rows=fake.record.rows, same=fake.record.same)
    made = training_graph(record, fakes, fake.mode, names, final, ambient)
    order = {number: index for index, number in enumerate(real.order)}
    placed = {node.name: place for place, node in made.placeholders.items()}
    needing_grad = {n for n, place in placed.items() if record.forms[place].requires_grad}

    def needs_grad(node: fx.Node) -> bool:
        return node.name in needing_grad

    observation.unsupported += spell_selections(made.graph)
    program = _program(made)
    graph_module = program.graph_module
    if real.functions.uses:
        observation.unsupported += link_functions(graph_module, real.functions.uses, without_casts)
    observation.unsupported += real.functions.problems
    observation.unsupported += spell_out_casts(graph_module, ambient_autocast(), needs_grad)
    observation.unsupported += prepare(graph_module, needs_grad)
    raise_deferred()
    with autocast_to(None):
        draws, by_origin = draws_by_origin(program, fake.mode) if observation.draws else ([], {})
        draws = [replace(each, stride=eagers.stride) for each, eagers in zip(draws, observation.draws, strict=False)]
        if fake.symbols is None and draws != observation.draws:
            reason = f"eager draws {observation.draws}; the graph {draws}"
            observation.unsupported.append(Unsupported("random draws", forward, reason))
        functional = functional_graph(replace(made, graph=graph_module.graph))
    raise_deferred()
    draw_of, unmatched = match_draws(functional.graph, by_origin, forward)
    if not observation.unsupported:
        observation.unsupported += unmatched
    bound = {n: order[place] for n, place in placed.items()}
    count = len(real.results)
    results = [each if isinstance(each, fx.Node) else None for each in functional.results[:count]]
    mutated = [(bound[n], node) for n, node in functional.written.items()]
    replaced, read = functional.results[count : count + len(real.final)], functional.results[count + len(real.final) :]
    mutated += list(zip([order[place] for place in real.final], replaced, strict=True))
    names = [tensor.names[0] for tensor in tensors]
    observation.unsupported += written_and_read(observation.checkpointed, [index for index, _ in mutated], names)
    readings = tuple(each.reading for each in record.reads)
    first = count + len(real.final)
    conditions, read = recomputed(functional.graph, read, readings, tensors, bound, made.literals, first)
    observation.unsupported += uncounted(read, readings)
    captured = Captured(
        module_name=name,
        graph=functional.graph,
        placeholders=bound,
        module_tensors=tuple(tensors),
        arguments=tuple(fake.arguments),
        argument_leaves=tuple(real.argument_leaves),
        argument_is_tensor=tuple(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves((args, kwargs))),
        in_spec=real.in_spec,
        results=tuple(results),
        mutated=tuple(mutated),
        observation=observation,
        fake_observation=observation,
        draw_of=draw_of,
        literals=made.literals,
        readings=readings,
        read=read,
        recomputed=conditions,
        loops=rolls,
        device=current_device(),
    )
    forget_real_tensors([*fake.arguments])
    return captured


def _free(real: RealRun) -> list[Unsupported]:
    """Free tensors for which no guard would see that another one takes their place."""
    guarded = set(map(id, real.before.tensors())) if real.record.free else set()
    found = []
    for tensor, index in real.record.free.values():
        problem = tensor_problem(tensor)
        if problem is None and id(tensor) in guarded:
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
    """A name of each input of the run, as torch.export would call its placeholder."""
    import inspect

    prefixes = {"parameter": "p_", "buffer": "b_"}
    found = [prefixes[each.kind] + _word(each.names[0]) for each in real.tensors[: len(real.real_tensors)]]
    signature = inspect.signature(module.forward)
    spec = real.in_spec
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
    found += ["c_" + _word(path) for path in real.attributes]
    return found


def _paths(spec: pytree.TreeSpec) -> list[str]:
    names = leaf_names(pytree.tree_structure((0, 0))) if False else None
    del names
    if spec.is_leaf():
        return [""]
    found = []
    keys = spec.context if isinstance(spec.context, list) and len(spec.context) == spec.num_children else None
    for index, child in enumerate(spec.children()):
        key = index if keys is None else keys[index]
        found += [f"_{key}{rest}" for rest in _paths(child)]
    return found


def _word(text: str) -> str:
    return re.sub(r"[^a-zA-Z0-9]", "_", text)


def _program(made: TrainingGraph) -> ExportedProgram:
    graph = made.graph
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    results = graph.output_node().args[0]
    specs = [
        OutputSpec(
            OutputKind.USER_OUTPUT,
            TensorArgument(name=each.name) if isinstance(each, fx.Node) else ConstantArgument(name="", value=None),
            None,
        )
        for each in results
    ]
    graph.output_node().args = (tuple(each if isinstance(each, fx.Node) else None for each in results),)
    signature = ExportGraphSignature(
        [InputSpec(InputKind.USER_INPUT, TensorArgument(name=node.name), None) for node in inputs], specs
    )
    in_spec = pytree.tree_flatten((tuple(inputs), {}))[1]
    out_spec = pytree.tree_flatten(tuple(0 for _ in results))[1]
    return ExportedProgram(
        nn.Module(),
        graph,
        signature,
        {},
        {},
        [ModuleCallEntry("", ModuleCallSignature([], [], in_spec, out_spec))],
        verifiers=[TrainingIRVerifier],
    )


del PythonState, CHANGES_ARGUMENT
