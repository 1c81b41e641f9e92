"""Lowering record: a lowered call ↔ named parts of an artifact, without pickle.

What a dispatched call needs is JSON and read at once: what the results are, which values are saved, how draws lie in
memory. Relax functions (TVM's JSON) and the traced graph are read when something asks for them: a report, a backward
for other grad_outs, a program that is not in the cache.
"""

from __future__ import annotations

import json
import operator
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import fx

from autodiff.ir import Function
from bridge.artifact import key_of
from bridge.aten import Imported
from bridge.base.devices import device_named, name_of, working_for
from bridge.base.torch_fakes import fake_mode
from bridge.base.torch_internals import OpOverload
from bridge.capture import (
    OWN,
    Captured,
    Draw,
    Observation,
    OperatorCall,
    Parameter,
    PreCallExpression,
    StepMasks,
    ValueIndex,
)
from bridge.compile import bytes_of, canonical_text, form_of, functions_of, tensor_of
from bridge.lowering.lowered import LoweredCall
from bridge.lowering.stage import Stage
from bridge.reference import run_graph
from partition import Cost, Partitioned, Plan, Saved

__all__ = ["KeptLowering", "NotRecordedError", "graph_of", "operation_of", "operation_record", "parts_of_lowering"]
__all__ += ["record_of"]


_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)


class NotRecordedError(TypeError):
    """A graph with something in it that has no plain form."""


def record_of(graph: fx.Graph) -> list[Any]:
    """The record of a traced graph; the GPU that this thread works for is any GPU there.

    Raises:
        NotRecordedError: it calls something else than operators, or holds an object that is no constant.
    """
    return [
        [node.op, node.name, _target(node), _plain(node.args), _plain(dict(node.kwargs)), _meta(node)]
        for node in graph.nodes
    ]


def graph_of(record: list[Any]) -> fx.Graph:
    """The graph of a record: equal nodes, with fake tensors of the same layouts for their values, on the GPU that this
    thread works for.

    Raises:
        NotRecordedError: this torch has not all of its operators.
    """
    graph, nodes, mode = fx.Graph(), {}, fake_mode()
    for op, name, target, args, kwargs, meta in record:
        given = _value(args, nodes.__getitem__), _value(kwargs, nodes.__getitem__)
        node = graph.create_node(op, _called(target) if op == "call_function" else target, *given, name=name)
        node.name = name  # torch.export gives names that a new node does not get, such as "input"
        nodes[name] = node
        node.meta.update({key: each for key, each in meta.items() if key != "val"})
        if "val" in meta:
            with mode:
                node.meta["val"] = _made(meta["val"])
    return graph


def operation_record(operation: OperatorCall) -> list[Any]:
    """The record of an operation by which a call recomputes a number.

    Raises:
        NotRecordedError: it is given something that has no plain form.
    """
    return [operation.name, _plain(operation.args), _plain(operation.kwargs)]


def operation_of(record: list[Any]) -> OperatorCall:
    """The operation of a record."""
    name, args, kwargs = record
    return OperatorCall(name, _value(args, {}.__getitem__), _value(kwargs, {}.__getitem__))


def _target(node: fx.Node) -> str:
    if node.op in ("placeholder", "output"):
        return str(node.target)
    if node.op == "call_function" and node.target is operator.getitem:
        return "getitem"
    if node.op == "call_function" and isinstance(node.target, OpOverload):
        return str(node.target)
    raise NotRecordedError(f"{node.op} of {node.target}")


def _called(target: str) -> Callable[..., Any]:
    if target == "getitem":
        return operator.getitem
    try:
        namespace, name, overload = target.split(".")
        return getattr(getattr(getattr(torch.ops, namespace), name), overload)
    except (ValueError, AttributeError) as error:
        raise NotRecordedError(f"operator {target}") from error


def _plain(value: Any) -> Any:
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return {"float": value.hex()}
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, ValueIndex):
        return {"place": value.index}
    if isinstance(value, _CONSTANTS):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": name_of(value)}
    if isinstance(value, list):
        return list(map(_plain, value))
    if isinstance(value, tuple):
        return {"tuple": list(map(_plain, value))}
    if isinstance(value, dict) and all(type(key) is str for key in value):
        return {"dict": [[key, _plain(each)] for key, each in value.items()]}
    raise NotRecordedError(f"{value!r} of {type(value)}")


def _value(plain: Any, node: Callable[[str], fx.Node]) -> Any:
    if isinstance(plain, list):
        return [_value(each, node) for each in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, inside),) = plain.items()
    match kind:
        case "float":
            return float.fromhex(inside)
        case "node":
            return node(inside)
        case "place":
            return ValueIndex(inside)
        case "torch":
            return getattr(torch, inside)
        case "device":
            return device_named(inside)
        case "tuple":
            return tuple(_value(each, node) for each in inside)
        case "dict":
            return {key: _value(each, node) for key, each in inside}
    raise NotRecordedError(f"{kind} in a record")


def _meta(node: fx.Node) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if isinstance(stack := node.meta.get("stack_trace"), str):
        found["stack_trace"] = stack
    custom = node.meta.get("custom") or {}
    if told := {key: custom[key] for key in ("where", OWN) if isinstance(custom.get(key), str)}:
        found["custom"] = told
    if modules := node.meta.get("nn_module_stack"):
        found["nn_module_stack"] = {str(key): [str(part) for part in each] for key, each in modules.items()}
    if "val" in node.meta:
        found["val"] = _described(node.meta["val"])
    return found


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        layout = tuple(value.shape), value.stride()
        if not all(type(each) is int for part in layout for each in part):
            raise NotRecordedError("a size that varies")
        return {"tensor": [list(layout[0]), list(layout[1]), _plain(value.dtype), name_of(value.device)]}
    if isinstance(value, tuple | list):
        return {"tuple": list(map(_described, value))}
    return _plain(value)


def _made(described: Any) -> Any:
    if isinstance(described, dict) and "tensor" in described:
        shape, stride, dtype, device = described["tensor"]
        return torch.empty_strided(shape, stride, dtype=getattr(torch, dtype["torch"]), device=device_named(device))
    if isinstance(described, dict) and "tuple" in described:
        return tuple(map(_made, described["tuple"]))
    return _value(described, {}.__getitem__)


_LITERAL = "literal "
_GRAPH_STAGE = "captured"


def parts_of_lowering(lowered: LoweredCall) -> dict[str, bytes]:
    """The parts of a static lowered call without counters and tensors that are attributes.

    Raises:
        NotRecordedError, ValueError: something in it has no plain form.
    """
    captured, imported = lowered.captured, lowered.imported
    if any(literal.is_complex() for literal in captured.literals.values()):
        raise NotRecordedError("a complex literal")
    places = {name: place for place, name in enumerate(node.name for node in captured.graph.nodes)}
    functions = [imported.function, *(stage.function for stage in lowered.stages[1:])]
    if lowered.partitioned is not None:
        functions.append(lowered.expected_backward)
    text = canonical_text(functions)
    call = {
        "content": key_of(text),
        "loops": captured.loops,
        "placeholders": captured.placeholders,
        "results": [None if node is None else places[node.name] for node in captured.results],
        "mutated": [[index, places[node.name]] for index, node in captured.mutated],
        "read": [None if node is None else places[node.name] for node in captured.read],
        "recomputed": list(map(_recomputed_record, captured.recomputed)),
        "draw_of": captured.draw_of,
        "draws": list(map(_draw, captured.draws)),
        "strides": [list(output.stride) if output.is_tensor else None for output in captured.outputs],
        "reads_validation": captured.observation.reads_validation,
        "imported": {each.name: getattr(imported, each.name) for each in fields(Imported) if each.name != "function"},
        "wanted": lowered.wanted,
        "differentiable": lowered.differentiable,
        "gradient_inputs": lowered.gradient_inputs if lowered.differentiable else (),
        "num_primals": lowered.num_primals,
        "num_results": lowered.num_results,
        "parameter_names": lowered.parameter_names,
        "capture_names": lowered.capture_names,
        "plan": None if lowered.plan is None else asdict(lowered.plan),
        "stages": [[stage.name, stage.made_by, stage.before] for stage in lowered.stages],
        "literals": {name: form_of(tensor) for name, tensor in captured.literals.items()},
    }
    parts = {
        "call": json.dumps(call).encode(),
        "graph": zlib.compress(json.dumps(record_of(captured.graph)).encode(), 1),
        "functions": zlib.compress(text.encode(), 1),
    }
    return parts | {f"{_LITERAL}{name}": bytes_of(tensor) for name, tensor in captured.literals.items()}


def _draw(draw: Draw) -> list[Any]:
    """How it lies in memory on real tensors; the rest is of the runs of the call at hand."""
    if any(isinstance(arg, Parameter) for arg in draw.args):
        raise NotRecordedError("a draw with computed parameters")
    if draw.steps is not None and draw.steps.dropouts:
        raise NotRecordedError("dropouts of a GPU in a loop")
    operand = draw.operand
    memory = None if operand is None else [list(operand.stride), operand.offset, operand.of]
    steps = None if draw.steps is None else [list(draw.steps.counts), str(draw.steps.dtype).removeprefix("torch.")]
    return [list(draw.stride), memory, draw.advance, steps]


def _as_drawn(draw: Draw, told: Sequence[Any]) -> Draw:
    stride, memory, advance, steps = told
    operand = draw.operand
    if memory is not None:
        operand = replace(operand, stride=tuple(memory[0]), offset=memory[1], of=memory[2])
    made_of = None if steps is None else StepMasks(tuple(steps[0]), getattr(torch, steps[1]))
    return replace(draw, stride=tuple(stride), operand=operand, advance=advance, steps=made_of)


def _recomputed_record(number: PreCallExpression) -> list[Any]:
    operations = list(map(operation_record, number.operations))
    return [number.where, list(number.numbers), list(number.inputs), operations]


def _recomputed_of(record: Sequence[Any]) -> PreCallExpression:
    where, numbers, inputs, operations = record
    return PreCallExpression(where, tuple(numbers), tuple(inputs), tuple(map(operation_of, operations)))


def _plan(told: Mapping[str, Any] | None) -> Plan | None:
    if told is None:
        return None
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in told.items()}
    for name in ("captures", "free"):
        given[name] = tuple(Saved(**{**each, "shape": tuple(each["shape"])}) for each in told[name])
    for name in ("cost", "inputs_only"):
        given[name] = Cost(**told[name])
    return Plan(**given)


class _LateCaptured(Captured):
    """A captured call whose graph is read when it is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name not in ("graph", "results", "mutated"):
            raise AttributeError(name)
        with working_for(self.device):
            graph = graph_of(json.loads(zlib.decompress(self.__dict__["_record"])))
        nodes, call = list(graph.nodes), self.__dict__["_call"]
        results = tuple(None if place is None else nodes[place] for place in call["results"])
        mutated = tuple((index, nodes[place]) for index, place in call["mutated"])
        self.__dict__.update(graph=graph, results=results, mutated=mutated)
        return self.__dict__[name]

    @cached_property
    def read(self) -> tuple[fx.Node | None, ...]:
        """In the place of the field's default, which ``__getattr__`` would not be asked before."""
        nodes = list(self.graph.nodes)
        return tuple(None if place is None else nodes[place] for place in self.__dict__["_call"]["read"])


class _LateImported(Imported):
    """An imported call whose function is read when it is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name != "function":
            raise AttributeError(name)
        return self.__dict__["_functions"].imported


class _Functions:
    """The Relax functions of a record."""

    def __init__(self, text: bytes, names: Sequence[str], has_backward: bool):
        self._text, self._names, self._has_backward = text, names, has_backward

    @cached_property
    def _all(self) -> list[Function]:
        return functions_of(zlib.decompress(self._text).decode())

    @property
    def imported(self) -> Function:
        return self._all[0]

    @cached_property
    def by_stage(self) -> dict[str, Function]:
        return dict(zip(self._names, self._all[1:], strict=False))

    @property
    def expected_backward(self) -> Function | None:
        return self._all[-1] if self._has_backward else None


class KeptLowering(LoweredCall):
    """A lowered call from an artifact; attributes as of :class:`LoweredCall`, most of them read late.

    Args:
        parts: of the artifact.
        given: arguments of :class:`Captured` that are those of the call at hand, as the observation of its runs.
    """

    def __init__(self, parts: Mapping[str, bytes], given: Mapping[str, Any]):
        call = json.loads(parts["call"])
        seen: Observation = given["observation"]
        outputs = [
            output if stride is None else replace(output, stride=tuple(stride))
            for output, stride in zip(seen.outputs, call["strides"], strict=True)
        ]
        draws = [_as_drawn(draw, told) for draw, told in zip(seen.draws, call["draws"], strict=True)]
        observation = replace(seen, draws=draws, outputs=outputs, reads_validation=call["reads_validation"])
        literals = {name: tensor_of(form, parts[f"{_LITERAL}{name}"]) for name, form in call["literals"].items()}
        self.captured = _without_init(
            _LateCaptured,
            **{**given, "observation": observation},
            **{name: call[name] for name in ("placeholders", "draw_of")},
            literals={name: tensor.to(given["device"]) for name, tensor in literals.items()},
            lines={},
            loops=call["loops"],
            recomputed=tuple(map(_recomputed_of, call["recomputed"])),
            _record=parts["graph"],
            _call=call,
        )
        if not call["mutated"]:
            self.captured.__dict__["mutated"] = ()
        self._stages = call["stages"]
        names = [name for name, *_ in self._stages[1:]]
        self._functions = _Functions(parts["functions"], names, call["plan"] is not None)
        told = {name: tuple(each) if isinstance(each, list) else each for name, each in call["imported"].items()}
        told["checks"] = tuple(map(tuple, told["checks"]))
        self.imported = _without_init(_LateImported, **told, _functions=self._functions)
        self.wanted, self.differentiable = tuple(call["wanted"]), tuple(call["differentiable"])
        self._plan, self.content, self.sample, self.seconds = _plan(call["plan"]), call["content"], None, 0.0
        for name in ("num_primals", "num_results"):
            self.__dict__[name] = call[name]
        for name in ("parameter_names", "capture_names", "gradient_inputs"):
            self.__dict__[name] = tuple(call[name])

    @staticmethod
    def content_of(parts: Mapping[str, bytes]) -> str:
        """What programs of the lowering's functions are known by."""
        return json.loads(parts["call"])["content"]

    @cached_property
    def stages(self) -> list[Stage]:
        """As of the process that lowered it; in this one, they took no time."""
        functions = self._functions.by_stage
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
        functions = self._functions.by_stage
        return Partitioned(self._plan, functions["split forward"], functions["split backward"])

    @property
    def plan(self) -> Plan | None:
        return self._plan

    @cached_property
    def expected_backward(self) -> Function | None:
        return self._functions.expected_backward


def _without_init(kind: type, **given: Any) -> Any:
    """An object of a frozen dataclass of which some fields come later."""
    made = object.__new__(kind)
    made.__dict__.update(given)
    return made
