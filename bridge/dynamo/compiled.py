"""A graph of Dynamo's + inputs of one layout → a compiled function, or ``UnsupportedModule`` with a brief reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from bridge.base.errors import Unsupported, UnsupportedModule, user_line
from bridge.base.torch_internals import TRANSFORM_MODULES, HigherOrderOperator, storage_id
from bridge.capture import one_capture_at_a_time
from bridge.compile import Backend
from bridge.dispatch import Entry, EntryOptions, backend_of_call, compile_programs
from bridge.dynamo.graph import DynamoGraph, GraphSizes, graphs_in, is_traceable
from bridge.lowering import lower_once
from bridge.state import SampleCall

__all__ = ["Compiled", "brief", "check_graph", "layout"]

#: Most reasons per graph, and operators per reason, that a message lists.
MAX_REASONS = 3
#: Dynamo's functions for torch.vmap, whose operators are traced on whole batches, and for Tensor.requires_grad_.
_TRACEABLE = (
    "set_inplace_requires_grad_allowed",
    "_set_tensor_requires_grad",
    "lazy_load_decompositions",
    "_vmap_increment_nesting",
    "_vmap_decrement_nesting",
    "_add_batch_dim",
    "_remove_batch_dim",
)


def check_graph(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Raises :class:`UnsupportedModule` for nodes that cannot be traced, and lazily negated or conjugated inputs."""
    problems = [
        Unsupported(_name(node.target), user_line(node.meta.get("stack_trace")) or node.name, reason)
        for graph in graphs_in(graph_module)
        for node in graph.graph.nodes
        if (reason := _objection(node))
    ]
    problems += [
        Unsupported(f"input {position}", "the graph's inputs", "a lazily negated or conjugated tensor")
        for position, value in enumerate(inputs)
        if isinstance(value, torch.Tensor) and (value.is_neg() or value.is_conj())
    ]
    if problems:
        raise UnsupportedModule("DynamoGraph", problems)


def _objection(node: fx.Node) -> str | None:
    """The reason why a node cannot be traced, or ``None``."""
    if isinstance(node.target, HigherOrderOperator) and not is_traceable(node):
        return "a higher-order operator"
    if node.op == "call_method" and node.target in ("item", "tolist"):
        return "reads numbers from a tensor that the graph computes"
    home = getattr(node.target, "__module__", None) or ""
    if home.startswith(TRANSFORM_MODULES) and _name(node.target) not in _TRACEABLE:
        return "a torch.func transform, or its like: it changes the interpreter's state as it is traced"
    return None


def _name(target: Any) -> str:
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


def brief(error: UnsupportedModule) -> str:
    """The reasons of an error on one line: an optimizer's step may change hundreds of parameters in place."""
    ops: dict[str, list[str]] = {}
    for problem in error.ops:
        ops.setdefault(problem.reason, []).append(problem.op)
    reasons = [f"{_some(list(dict.fromkeys(names)), ', ')}: {reason}" for reason, names in ops.items()]
    return _some(reasons, "; ")


def _some(words: list[str], separator: str) -> str:
    more = [f"and {len(words) - MAX_REASONS} more"] if len(words) > MAX_REASONS else []
    return separator.join(words[:MAX_REASONS] + more)


class Compiled:
    """A graph compiled for inputs of one layout, maybe with dynamic sizes.

    Attributes:
        entry: the compiled entry; it has no guard, since Dynamo has one.
        other: for calls that take another branch (``torch.cond``); or the reason why there is none.

    Args:
        backend: ``None``: the backend of the inputs' device.
        sizes: the dynamic sizes, if any.

    Raises:
        UnsupportedModule, CompilationError: as :func:`bridge.lower`.
    """

    def __init__(
        self,
        graph_module: fx.GraphModule,
        inputs: Sequence[Any],
        partition: Any,
        backend: Backend | None,
        sizes: GraphSizes | None = None,
    ):
        check_graph(graph_module, inputs)
        region = DynamoGraph(graph_module, inputs, sizes)
        arguments = tuple(inputs[position] for position in region.arguments)
        dims = sizes.dynamic_dims(inputs, region.arguments) if sizes is not None else ()
        call = SampleCall(region, arguments, {}, dims)
        backend = backend_of_call(backend, call)
        with one_capture_at_a_time():
            lowered = lower_once(call, partition)
        captured = lowered.captured
        self.other: Compiled | str | None = None
        self.entry = Entry(None, lowered, compile_programs(lowered, backend), EntryOptions(partition, backend))
        self._owned = [
            (None, region.input_of[spec.name])
            if spec.name in region.input_of
            else (graph_module, spec.name.removeprefix("graph_module."))
            for spec in captured.module_tensors
        ]
        tensors = [position for position in region.arguments if isinstance(inputs[position], torch.Tensor)]
        self._places = tensors
        self._sizes = sizes
        self._layouts = [] if sizes is None else [layout(value) for value in inputs]
        positions = [where if owner is None else None for owner, where in self._owned] + tensors
        self._mutated = [place for index, _ in captured.mutated if (place := positions[index]) is not None]

    def __call__(self, inputs: Sequence[Any]) -> Any:
        owned = [inputs[where] if owner is None else _attribute(owner, where) for owner, where in self._owned]
        return self.entry(owned + [inputs[place] for place in self._places])

    def fits(self, inputs: Sequence[Any]) -> bool:
        """Whether the entry, with dynamic shapes, serves these inputs; the modes must be equal."""
        if self.entry.bound is None or self.differing(inputs):
            return False
        return self.entry.bound.fit([inputs[place] for place in self._places])

    def differing(self, inputs: Sequence[Any]) -> frozenset[int]:
        """Positions of the inputs that differ from the compiled ones in more than dynamic sizes."""
        sized = {*self._sizes.tensors, *self._sizes.numbers}
        return frozenset(
            place
            for place, (then, now) in enumerate(zip(self._layouts, map(layout, inputs), strict=True))
            if ((_without_sizes(now) != _without_sizes(then)) if place in sized else now != then)
        )

    def objection(self, inputs: Sequence[Any]) -> str | None:
        """The reason to run inputs with a matching layout eager: one that is written shares memory with another."""
        for mutated in self._mutated:
            memory = storage_id(inputs[mutated])
            for position, value in enumerate(inputs):
                if position != mutated and isinstance(value, torch.Tensor):
                    if storage_id(value) == memory:
                        return f"input {mutated} is changed in place and shares its memory with input {position}"
        return None


def layout(value: Any) -> Any:
    """An input → the part of the entry's key: a tensor's metadata, any other value itself."""
    if isinstance(value, float):
        return float, value.hex()  # -0.0 is not 0.0, nan is nan
    if not isinstance(value, torch.Tensor):
        return type(value), value
    strided = value.layout is torch.strided
    return (
        type(value),
        value.shape,
        value.stride() if strided else value.layout,
        value.dtype,
        value.device,
        value.requires_grad,
        value.is_neg() or value.is_conj(),
    )


def _without_sizes(found: tuple) -> tuple:
    """:func:`layout` without a tensor's shape and strides, or without a number's value."""
    return found[:1] + found[3:]


def _attribute(owner: nn.Module, path: str) -> torch.Tensor:
    value: Any = owner
    for part in path.split("."):
        value = getattr(value, part)
    return value
