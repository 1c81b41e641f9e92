"""Lowering record: a lowered call ↔ named parts of an artifact, without pickle.

The data of a dispatched call is JSON and read at once: results, saved tensors, memory layouts of draws. Relax functions
(TVM's JSON) and the traced graph are read on demand: for a report, a backward for other grad_outs, a program that is
not in the cache.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from typing import Any

import torch
from torch import fx
from torch.fx.immutable_collections import immutable_dict, immutable_list

from autodiff.ir import Function
from autodiff.lazy import cached_property
from bridge.artifact import (
    NoFormError,
    from_parts,
    from_text,
    key_of,
    to_parts,
    to_text,
    written,
    written_as,
    written_like,
)
from bridge.aten import Imported
from bridge.base.devices import working_for
from bridge.base.torch_fakes import fake_mode
from bridge.base.torch_internals import OpOverload, overload_named, pytree
from bridge.capture import (
    FUNCTIONS,
    OWN,
    PART_OF,
    PATH,
    WHERE,
    Captured,
    CapturedNames,
    Draw,
    Observation,
    Parameter,
    PreCallExpression,
    StepMasks,
)
from bridge.compile import canonical_text, functions_of
from bridge.lowering.lowered import LoweredCall
from bridge.lowering.stage import Stage
from bridge.reference import run_graph
from partition import Cost, Partitioned, Plan, Saved

_NAMES = {each: name for name, each in FUNCTIONS.items()}


def record_of(graph: fx.Graph) -> str:
    """The record of a traced graph; it names the thread's current GPU only as "the GPU".

    ``NoFormError`` if the graph calls a function that is no operator, or holds an object that is no constant.
    """
    rows = [(node.op, node.name, _target(node), node.args, node.kwargs, _meta(node)) for node in graph.nodes]
    return to_text(tuple(rows))


def graph_of(record: str | bytes) -> fx.Graph:
    """The graph of a record: equal nodes, whose values are fake tensors of the same layouts, on the thread's GPU.

    ``ValueError`` if this torch lacks one of its operators.
    """
    graph, nodes, mode = fx.Graph(), {}, fake_mode()
    for op, name, target, args, kwargs, meta in from_text(record):
        given = pytree.tree_map_only(_Later, lambda each: nodes[each.name], (args, kwargs))
        called = FUNCTIONS[target] if op == "call_function" and isinstance(target, str) else target
        node = graph.create_node(op, called, *given, name=name)
        node.name = name  # torch.export uses names that a new node does not get, such as "input"
        nodes[name] = node
        node.meta.update({key: each for key, each in meta.items() if key != "val"})
        if "val" in meta:
            with mode:
                node.meta["val"] = pytree.tree_map_only(_Layout, _Layout.empty, meta["val"])
    return graph


@dataclass(frozen=True)
class _Later:
    """A placeholder for a node that is created later: rows are parsed at once."""

    name: str


@dataclass(frozen=True)
class _Layout:
    """The memory layout of a fake tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Layout:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    def empty(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


def _target(node: fx.Node) -> Any:
    if node.op in ("placeholder", "output"):
        return str(node.target)
    if node.op == "call_function" and isinstance(node.target, OpOverload):
        return node.target
    if node.op == "call_function" and node.target in _NAMES:
        return _NAMES[node.target]
    raise NoFormError(f"{node.op} of {node.target}")


def _meta(node: fx.Node) -> dict[str, Any]:
    found: dict[str, Any] = {key: node.meta[key] for key in (WHERE, PATH, PART_OF, OWN) if key in node.meta}
    if "val" in node.meta:
        val = node.meta["val"]
        found["val"] = pytree.tree_map_only(torch.Tensor, _Layout.of, tuple(val) if isinstance(val, list) else val)
    return found


written(Cost, Plan, PreCallExpression, Saved, StepMasks, _Layout)
written_as(fx.Graph, "Graph", ("record",), lambda graph: (record_of(graph),), lambda record: graph_of(record))
written_as(fx.Node, "Node", ("name",), lambda node: (node.name,), _Later)
written_as(OpOverload, "OpOverload", ("name",), lambda op: (str(op),), overload_named)
written_like(immutable_list, list)
written_like(immutable_dict, dict)

_GRAPH_STAGE = "captured"
_ATTRIBUTES = ("wanted", "differentiable", "num_primals", "num_results", "parameter_names", "capture_names")
"""Attributes of a lowered call that are kept as they are."""


def parts_of_lowering(lowered: LoweredCall) -> dict[str, bytes]:
    """The artifact parts of a static lowered call that has no counters and no attribute tensors.

    ``NoFormError`` or ``ValueError`` if an object in it has no serialized form.
    """
    captured, imported = lowered.captured, lowered.imported
    if any(literal.is_complex() for literal in captured.names.literals.values()):
        raise NoFormError("a complex literal")
    places = {name: place for place, name in enumerate(node.name for node in captured.graph.nodes)}
    functions = [imported.function, *(stage.function for stage in lowered.stages[1:])]
    if lowered.partitioned is not None:
        functions.append(lowered.expected_backward)
    text = canonical_text(functions)
    call = {
        "content": key_of(text),
        "loops": captured.loop.is_recorded,
        "placeholders": captured.names.placeholders,
        "results": tuple(None if node is None else places[node.name] for node in captured.results),
        "mutated": tuple((index, places[node.name]) for index, node in captured.mutated),
        "read": tuple(None if node is None else places[node.name] for node in captured.read),
        "recomputed": captured.numbers.expressions,
        "by_draws": captured.numbers.by_draws,
        "draw_of": captured.names.draws,
        "draws": tuple(map(_draw, captured.draws)),
        "strides": tuple(output.stride if output.is_tensor else None for output in captured.outputs),
        "reads_validation": captured.observation.reads_validation,
        "imported": {each.name: getattr(imported, each.name) for each in fields(Imported) if each.name != "function"},
        **{name: getattr(lowered, name) for name in _ATTRIBUTES},
        "gradient_inputs": lowered.gradient_inputs if lowered.differentiable else (),
        "plan": lowered.plan,
        "stages": tuple((stage.name, stage.made_by, stage.before) for stage in lowered.stages),
        "literals": captured.names.literals,
    }
    return to_parts(call) | {
        "graph": zlib.compress(record_of(captured.graph).encode(), 1),
        "functions": zlib.compress(text.encode(), 1),
    }


def _draw(draw: Draw) -> tuple:
    """The draw's memory layout on real tensors; all else comes from the current call's runs."""
    if any(isinstance(arg, Parameter) for arg in draw.args):
        raise NoFormError("a draw with computed parameters")
    if draw.steps is not None and draw.steps.dropouts:
        raise NoFormError("dropouts of a GPU in a loop")
    operand = draw.operand
    memory = None if operand is None else (operand.stride, operand.offset, operand.of)
    return draw.stride, memory, draw.advance, draw.steps


def _as_drawn(draw: Draw, told: tuple) -> Draw:
    stride, memory, advance, steps = told
    operand = draw.operand
    if memory is not None:
        operand = replace(operand, **dict(zip(("stride", "offset", "of"), memory, strict=True)))
    return replace(draw, stride=stride, operand=operand, advance=advance, steps=steps)


class _LateCaptured(Captured):
    """A captured call whose graph is read on first access."""

    def __getattr__(self, name: str) -> Any:
        if name not in ("graph", "results", "mutated"):
            raise AttributeError(name)
        with working_for(self.device):
            graph = graph_of(zlib.decompress(self.__dict__["_record"]))
        nodes, call = list(graph.nodes), self.__dict__["_call"]
        results = tuple(None if place is None else nodes[place] for place in call["results"])
        mutated = tuple((index, nodes[place]) for index, place in call["mutated"])
        self.__dict__.update(graph=graph, results=results, mutated=mutated)
        return self.__dict__[name]

    @cached_property
    def read(self) -> tuple[fx.Node | None, ...]:
        """Replaces the field's default, which would hide the attribute from ``__getattr__``."""
        nodes = list(self.graph.nodes)
        return tuple(None if place is None else nodes[place] for place in self.__dict__["_call"]["read"])


class _LateImported(Imported):
    """An imported call whose function is read on first access."""

    def __getattr__(self, name: str) -> Any:
        if name != "function":
            raise AttributeError(name)
        return self.__dict__["_functions"]()[0]


class KeptLowering(LoweredCall):
    """A lowered call from an artifact; attributes as of :class:`LoweredCall`, most of them read on demand.

    Args:
        parts: of the artifact.
        given: arguments of :class:`Captured` from the current call, such as the observation of its runs.
    """

    def __init__(self, parts: Mapping[str, bytes], given: Mapping[str, Any]):
        call = from_parts(parts)
        seen: Observation = given["observation"]
        outputs = [
            output if stride is None else replace(output, stride=stride)
            for output, stride in zip(seen.outputs, call["strides"], strict=True)
        ]
        draws = [_as_drawn(draw, told) for draw, told in zip(seen.draws, call["draws"], strict=True)]
        observation = replace(seen, draws=draws, outputs=outputs, reads_validation=call["reads_validation"])
        literals = {name: tensor.to(given["device"]) for name, tensor in call["literals"].items()}
        self.captured = _without_init(
            _LateCaptured,
            **{name: each for name, each in given.items() if name not in ("observation", "numbers", "loop")},
            observation=observation,
            names=CapturedNames(call["placeholders"], call["draw_of"], literals),
            numbers=given["numbers"]._replace(expressions=call["recomputed"], by_draws=call["by_draws"]),
            loop=given["loop"]._replace(is_recorded=call["loops"]),
            _record=parts["graph"],
            _call=call,
        )
        if not call["mutated"]:
            self.captured.__dict__["mutated"] = ()
        self._stages = call["stages"]
        #: () → the functions of the imported and the further stages, and the expected backward, if there is one.
        text = parts["functions"]
        self._functions = cache(lambda: functions_of(zlib.decompress(text).decode()))
        self.imported = _without_init(_LateImported, **call["imported"], _functions=self._functions)
        self._plan, self.content, self.sample, self.seconds = call["plan"], call["content"], None, 0.0
        self.__dict__.update({name: call[name] for name in (*_ATTRIBUTES, "gradient_inputs")})

    @staticmethod
    def content_of(parts: Mapping[str, bytes]) -> str:
        """The digest in the cache keys of programs of the lowering's functions."""
        return from_parts(parts)["content"]

    @cached_property
    def stages(self) -> list[Stage]:
        """The stages of the process that lowered the call; in this process they took no time."""
        functions = dict(zip([name for name, *_ in self._stages[1:]], self._functions()[1:], strict=False))
        runner = partial(run_graph, self.captured, self.imported)
        return [
            Stage(name, made_by, self.captured.graph, 0.0, before, runner)
            if name == _GRAPH_STAGE
            else Stage(name, made_by, functions[name], 0.0, before)
            for name, made_by, before in self._stages
        ]

    @cached_property
    def partitioned(self) -> Partitioned | None:
        if self._plan is None:
            return None
        return Partitioned(self._plan, self["split forward"].function, self["split backward"].function)

    @property
    def plan(self) -> Plan | None:
        return self._plan

    @cached_property
    def expected_backward(self) -> Function | None:
        return None if self._plan is None else self._functions()[-1]


def _without_init(kind: type, **given: Any) -> Any:
    """An object of a frozen dataclass, without its ``__init__``: some fields are set later."""
    made = object.__new__(kind)
    made.__dict__.update(given)
    return made
