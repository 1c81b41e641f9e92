"""Kinds of calls: a training-IR graph → its functional graph, with equal operator calls decomposed once.

Two calls are of one kind if they call the same operator with the same constants on tensors of the same layout. One
program with a call of each kind is decomposed; what that gives for a kind replaces every call of it. Of twelve equal
layers or a hundred time steps one is decomposed, and none where this process has decomposed such a one before.
A call that decomposing leaves whole stands for itself, and is not in that program.

This is exact for graphs without writes: there an operator computes the same whatever else is in the graph, views need
no functionalization, and a decomposition sees of its arguments nothing but layout and ``requires_grad``. A graph with
anything else in it, or one in which a decomposition gives another layout than the training IR has, is left to the
caller.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)

from bridge.base.torch_fakes import stand_in
from bridge.base.torch_internals import FakeTensor, OpOverload, aten, pytree, schema
from bridge.base.torch_shapes import environment, expression, fixed, is_decided
from bridge.capture.loops.operators import MARKS
from bridge.capture.passes.call_kinds import form, is_of_sizes, kind_key, requires_grad
from bridge.capture.passes.formulas import (
    Formula,
    copied_formula,
    decomposition_settings,
    known_formula,
    remember_formula,
)
from bridge.capture.passes.size_nodes import NoSizeNodeError, SizeNodes

__all__ = ["Functional", "functional_by_kind"]

_HANDED_ON = ("custom", "stack_trace", "nn_module_stack")
_NAME = re.compile(r"_\d+$")


@dataclass(frozen=True)
class Functional:
    """A functional graph with what its inputs and results are; as in ``ExportedProgram``."""

    graph: fx.Graph
    graph_signature: ExportGraphSignature
    constants: dict[str, Any]


@dataclass(frozen=True)
class _Kind:
    """The first call of a kind: the node, and the tensors that it reads, each once."""

    node: fx.Node
    sources: tuple[fx.Node, ...]


def functional_by_kind(
    exported: ExportedProgram,
    decompose: Callable[[ExportedProgram], ExportedProgram],
    is_left_whole: Callable[[OpOverload], bool],
) -> Functional | None:
    """The functional graph of a training-IR program, or ``None`` where it has to be decomposed as a whole.

    Args:
        decompose: decomposes a program; it is given one of distinct calls.
        is_left_whole: whether that leaves each call of an operator as it is, and makes a tensor in memory of its own.
    """
    kind_of = _kinds(exported)
    if kind_of is None:
        return None
    try:
        kinds = list(dict.fromkeys(kind_of.values()))
        whole = {kind: _itself(kind) for kind in kinds if _is_of_tensors(kind) and is_left_whole(kind.node.target)}
        formulas = _formulas([kind for kind in kinds if kind not in whole], exported, decompose)
        return None if formulas is None else _put_together(exported, kind_of, whole | formulas)
    except NoSizeNodeError:
        return None


def _is_of_tensors(kind: _Kind) -> bool:
    """Whether a call takes tensors and constants, no sizes that vary, and gives one tensor."""
    given = (source.meta.get("val") for source in kind.sources)
    return isinstance(kind.node.meta.get("val"), FakeTensor) and all(isinstance(each, FakeTensor) for each in given)


def _itself(kind: _Kind) -> Formula:
    """The formula of a call that is left whole."""
    whole = Formula(kind.sources, (kind.node,), (kind.node,))
    return copied_formula(whole, lambda value: stand_in(value, value.fake_mode))


def _formulas(
    kinds: Sequence[_Kind], exported: ExportedProgram, decompose: Callable[[ExportedProgram], ExportedProgram]
) -> dict[_Kind, Formula] | None:
    """What each kind decomposes to, as this process knows or finds now; ``None`` as for :func:`_decomposed`."""
    settings = decomposition_settings()
    keys = {kind: (kind_key(kind.node), settings) for kind in kinds}
    known = {kind: known_formula(kind.node, key) for kind, key in keys.items()}
    missing = [kind for kind, formula in known.items() if formula is None]
    if not missing:
        return known
    found = _decomposed(missing, decompose(_program(missing, exported)))
    if found is None:
        return None
    for kind, formula in found.items():
        remember_formula(kind.node, keys[kind], formula)
    return known | found


def _kinds(exported: ExportedProgram) -> dict[fx.Node, _Kind] | None:
    """The kind of every call in order, ``None`` if the graph has something else than operators that only read."""
    if any(spec.kind != OutputKind.USER_OUTPUT for spec in exported.graph_signature.output_specs):
        return None
    known: dict[tuple, _Kind] = {}
    found: dict[fx.Node, _Kind] = {}
    for node in exported.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.op != "call_function":
            return None
        if isinstance(node.meta.get("val"), torch.SymInt) and is_of_sizes(node):
            continue
        if node.target is operator.getitem:
            source = node.args[0]
            if source not in found or not isinstance(node.meta["val"], FakeTensor):
                return None
            if isinstance(source.meta.get("val"), FakeTensor):  # torch 2.11 notes one of the attention's two results
                return None
            continue
        if not isinstance(node.target, OpOverload) or not _only_reads(node.target):
            return None
        sources = tuple(node.all_input_nodes)
        values = [*_tensors(node.meta.get("val")), *(source.meta.get("val") for source in sources)]
        if not all(map(_is_plain, (value for value in values if not isinstance(value, torch.SymInt)))):
            return None
        if any(isinstance(source.meta.get("val"), torch.SymInt) and not is_of_sizes(source) for source in sources):
            return None
        found[node] = known.setdefault(kind_key(node), _Kind(node, sources))
    return found


def _tensor_sources(node: fx.Node) -> list[fx.Node]:
    return [source for source in node.all_input_nodes if not isinstance(source.meta["val"], torch.SymInt)]


def _only_reads(op: Any) -> bool:
    """Whether an operator writes nothing, as far as its schema tells, and looks at no memory beside its tensors'."""
    if schema(op).is_mutable or op.namespace not in ("aten", "tvm_dispatch"):
        return False
    return op.overloadpacket not in _WRITES


#: Running statistics are written although the schema does not say so; an assertion is an effect; memory beyond a view.
_WRITES = (aten.batch_norm, aten.instance_norm, aten._assert_async, aten.as_strided)


def _tensors(value: Any) -> list[Any]:
    """What an operator returns: a tensor, several, or none."""
    if value is None:
        return []
    return list(value) if isinstance(value, tuple | list) else [value]


def _is_plain(value: Any) -> bool:
    if not isinstance(value, FakeTensor) or value.layout is not torch.strided:
        return False
    return not (value.is_conj() or value.is_neg()) and all(map(_is_known, value.shape))


def _is_known(extent: Any) -> bool:
    return type(extent) is int or is_decided(environment(extent), expression(extent))


def _program(kinds: Sequence[_Kind], exported: ExportedProgram) -> ExportedProgram:
    """One call of each kind, on inputs of its own; its tensors are the results."""
    graph, results = fx.Graph(), []
    sizes = SizeNodes(graph)
    for node in exported.graph.nodes:
        if node.op == "placeholder" and _has_symbols(node):
            sizes.read_from(_placeholder(graph, f"sizes_{node.name}", node))
    for index, kind in enumerate(kinds):
        own: dict[fx.Node, Any] = {}
        for k, source in enumerate(kind.sources):
            value = source.meta["val"]
            is_size = isinstance(value, torch.SymInt)
            own[source] = sizes.node(fixed(value)) if is_size else _placeholder(graph, f"x{index}_{k}", source)
        args, kwargs = fx.map_arg((kind.node.args, kind.node.kwargs), own.__getitem__)
        call = graph.call_function(kind.node.target, args, kwargs)
        call.meta = {**kind.node.meta, "custom": {"origin": str(index)}}
        value = kind.node.meta.get("val")
        if isinstance(value, torch.Tensor):
            results.append(call)
            continue
        for k, tensor in enumerate(_tensors(value)):
            results.append(graph.call_function(operator.getitem, (call, k)))
            results[-1].meta = {**call.meta, "val": tensor}
    graph.output(tuple(results))
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    signature = ExportGraphSignature(
        [InputSpec(InputKind.USER_INPUT, TensorArgument(name=node.name), None) for node in inputs],
        [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(name=node.name), None) for node in results],
    )
    in_spec = pytree.tree_flatten((tuple(inputs), {}))[1]
    call_signature = ModuleCallSignature([], [], in_spec, pytree.tree_flatten(tuple(results))[1])
    return ExportedProgram(
        torch.nn.Module(),
        graph,
        signature,
        {},
        {},
        [ModuleCallEntry("", call_signature)],
        verifiers=exported.verifiers,
    )


def _has_symbols(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and any(isinstance(extent, torch.SymInt) for extent in value.shape)


def _placeholder(graph: fx.Graph, name: str, source: fx.Node) -> fx.Node:
    made, value = graph.placeholder(name), source.meta["val"]
    made.meta["val"] = stand_in(value, value.fake_mode).requires_grad_(requires_grad(source))
    return made


def _decomposed(kinds: Sequence[_Kind], program: ExportedProgram) -> dict[_Kind, Formula] | None:
    """What each kind became; ``None`` if something was written, made outside of the calls or given another layout."""
    signature, nodes = program.graph_signature, {node.name: node for node in program.graph.nodes}
    if any(spec.kind != InputKind.USER_INPUT for spec in signature.input_specs):
        return None
    if any(spec.kind != OutputKind.USER_OUTPUT for spec in signature.output_specs):
        return None
    own_inputs = sum(len(_tensor_sources(kind.node)) for kind in kinds)  # those for sizes come before
    inputs = iter([nodes[spec.arg.name] for spec in signature.input_specs][-own_inputs:] if own_inputs else [])
    results = iter([nodes[spec.arg.name] for spec in signature.output_specs])
    calls: dict[str, list[fx.Node]] = {str(index): [] for index in range(len(kinds))}
    for node in program.graph.nodes:
        if node.op in ("placeholder", "output") or (
            isinstance(node.meta.get("val"), torch.SymInt) and is_of_sizes(node)
        ):
            continue
        origin = (node.meta.get("custom") or {}).get("origin")
        if node.op != "call_function" or origin not in calls:
            return None
        calls[origin].append(node)
    found = {}
    for index, kind in enumerate(kinds):
        given = _tensors(kind.node.meta.get("val"))
        own = tuple(next(inputs) for _ in _tensor_sources(kind.node))
        made = tuple(next(results) for _ in given)
        if any(form(node.meta["val"]) != form(value) for node, value in zip(made, given, strict=True)):
            return None
        found[kind] = Formula(own, tuple(calls[str(index)]), made)
    return found


def _put_together(
    exported: ExportedProgram, kind_of: dict[fx.Node, _Kind], formulas: dict[_Kind, Formula]
) -> Functional:
    graph = fx.Graph()
    sizes = SizeNodes(graph)
    new: dict[fx.Node, Any] = {}
    for node in exported.graph.nodes:
        if node.op == "placeholder":
            new[node] = made = graph.create_node("placeholder", node.target, name=node.name)
            made.name, made.meta = node.name, dict(node.meta)  # also "input", which is no name for a new node
            sizes.read_from(made)
        elif node.op == "output":
            graph.output(fx.map_arg(node.args[0], new.__getitem__))
        elif node in kind_of:
            results = _call(graph, node, formulas[kind_of[node]], new, sizes)
            new[node] = results if isinstance(node.meta.get("val"), tuple | list) else next(iter(results), None)
        elif node.target is operator.getitem:
            source, index = node.args
            new[node] = new[source][index]
        else:
            new[node] = sizes.node(fixed(node.meta["val"]))
    for node in reversed(graph.nodes):  # torch drops unused draws too: who makes a call draws for it (bridge.rng)
        if (
            node.op == "call_function"
            and not node.users
            and node.meta.get("val") is not None
            and node.target not in MARKS
        ):
            graph.erase_node(node)
    signature = exported.graph_signature
    outputs = zip(signature.output_specs, graph.output_node().args[0], strict=True)
    results = [
        replace(spec, arg=type(spec.arg)(name=made.name)) if isinstance(made, fx.Node) else spec
        for spec, made in outputs
    ]
    return Functional(graph, ExportGraphSignature(signature.input_specs, results), exported.constants)


def _call(
    graph: fx.Graph, node: fx.Node, formula: Formula, new: dict[fx.Node, Any], sizes: SizeNodes
) -> tuple[fx.Node, ...]:
    """The calls that a kind decomposes to, in the place of ``node``; what they are from and where is that node's."""
    handed_on = {key: node.meta[key] for key in _HANDED_ON if key in node.meta}
    own = dict(zip(formula.inputs, (new[source] for source in _tensor_sources(node)), strict=True))

    def put(arg: fx.Node) -> Any:
        return own[arg] if arg in own else sizes.node(fixed(arg.meta["val"]))

    for call in formula.calls:
        args, kwargs = fx.map_arg((call.args, call.kwargs), put)
        name = _NAME.sub("", call.name)
        own[call] = made = graph.create_node("call_function", call.target, args, kwargs, name=name)
        made.meta = {**({"val": call.meta["val"]} if "val" in call.meta else {}), **handed_on}
    return tuple(own[result] for result in formula.results)
