"""Functional graph: a training graph → core ATen operators that write nothing, with composite ones decomposed.

Each operator of the training graph runs once on fake tensors, under torch's functionalization; what it calls is written
down, but for operators that are left whole (:mod:`bridge.capture.passes.preserved_ops`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import fx

from bridge.base.devices import current_device
from bridge.base.torch_internals import (
    FunctionalTensor,
    OpOverload,
    aten,
    autograd_key,
    has_own_kernel,
    implements_composite,
    python_kernels,
    pytree,
)
from bridge.base.torch_recording import (
    BelowFunctionalMode,
    FunctionalTensorMode,
    below_autograd,
    composite_kernel,
    functional_of,
    in_functional,
    is_written,
)
from bridge.base.torch_shapes import SYMBOLIC
from bridge.capture.loops.operators import MARKS
from bridge.capture.passes.decompositions import composite_formulas, formulas, whole_operators
from bridge.capture.passes.told import ROW
from bridge.capture.recorded_draws import draws
from bridge.capture.size_formulas import POOLINGS
from bridge.capture.size_nodes import SizeNodes
from bridge.capture.training_graph import TrainingGraph

__all__ = ["FunctionalGraph", "drop_unused", "functional_graph"]

_HANDED_ON = ("custom", "stack_trace", "nn_module_stack", ROW)


@dataclass(frozen=True)
class FunctionalGraph:
    """A functional graph without an output.

    Attributes:
        results: for each result of the training graph its node; what is no node stays.
        written: of each placeholder that is written, by name, the node of its new value.
        drawing: the nodes that draw, in order.
    """

    graph: fx.Graph
    results: Sequence[Any]
    written: dict[str, fx.Node]
    drawing: Sequence[fx.Node]


def functional_graph(made: TrainingGraph) -> FunctionalGraph:
    """The functional graph of a training graph, whose ``meta["custom"]`` its nodes hand on."""
    emitter = _Emitter(symbolic=made.mode.shape_env is not None)
    values: dict[fx.Node, Any] = {}
    inputs: dict[str, Any] = {}
    results: list[Any] = []
    with torch.no_grad(), below_autograd(), made.mode, emitter, _Functional() as mode:
        del mode
        for node in made.graph.nodes:
            emitter.current = node
            if node.op == "placeholder":
                inputs[node.name] = values[node] = FunctionalTensor.to_functional(emitter.placeholder(node))
            elif node.op == "output":
                results = [_inner(values[each]) if isinstance(each, fx.Node) else each for each in node.args[0]]
            else:
                args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)
        written = {name: emitter.node_of(_inner(value)) for name, value in inputs.items() if is_written(value)}
    results = [emitter.node_of(each) if isinstance(each, torch.Tensor) else each for each in results]
    return FunctionalGraph(emitter.graph, results, written, [node for node in emitter.graph.nodes if draws(node)])


def _inner(value: Any) -> Any:
    return in_functional(value) if isinstance(value, FunctionalTensor) else value


def drop_unused(graph: fx.Graph) -> None:
    """Erases calls whose results nobody reads, and that have no effect."""
    for node in reversed(graph.nodes):  # torch drops unused draws too: who makes a call draws for it (bridge.rng)
        if node.op == "call_function" and not node.users and node.target not in MARKS:
            if isinstance(node.target, OpOverload) and node.target in _EFFECTS:
                continue
            graph.erase_node(node)


_EFFECTS = (aten._assert_async.msg,)


class _Functional(FunctionalTensorMode):
    """Functionalization that decomposes composite operators, but for those that are left whole."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if _is_whole(func):
            args, kwargs = pytree.tree_map_only(FunctionalTensor, in_functional, (args, kwargs))
            return pytree.tree_map_only(torch.Tensor, partial(functional_of, mode=self), func(*args, **kwargs))
        for formula in (POOLINGS.get(func), composite_formulas().get(func) or func.py_kernels.get(autograd_key)):
            if formula is not None:
                with self:
                    made = formula(*args, **kwargs)
                if made is not NotImplemented:
                    return made
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _can_decompose(self, func, args, kwargs):
        return implements_composite(func)


def _is_whole(func: Any) -> bool:
    """Whether an operator is left whole, which makes a tensor in memory of its own: as told, or since eager has a
    kernel for it on the device, which goes before what it is composed of."""
    if func in whole_operators():
        return True
    if func.namespace != "aten" or func in formulas():
        return False
    return implements_composite(func) and has_own_kernel(func, current_device())


class _Emitter(BelowFunctionalMode):
    """Writes functional operators down, those with a decomposition as what that calls."""

    def __init__(self, *, symbolic: bool) -> None:
        super().__init__()
        self.symbolic = symbolic
        self.graph = fx.Graph()
        self.sizes = SizeNodes(self.graph)
        self.current: fx.Node | None = None
        self._nodes: dict[int, tuple[torch.Tensor, fx.Node]] = {}

    def placeholder(self, node: fx.Node) -> torch.Tensor:
        made = self.graph.create_node("placeholder", node.target, name=node.name)
        made.name, made.meta = node.name, dict(node.meta)
        self.sizes.read_from(made)
        return self._noted(node.meta["val"], made)

    def node_of(self, tensor: torch.Tensor) -> fx.Node:
        return self._nodes[id(tensor)][1]

    def _noted(self, tensor: torch.Tensor, node: fx.Node) -> torch.Tensor:
        self._nodes[id(tensor)] = tensor, node
        self.tensor_tracker[tensor] = _Tracked(_Proxied(node))
        return tensor

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(issubclass(kind, FunctionalTensor) for kind in types):
            return NotImplemented
        if func.namespace == "prim" or func.name().startswith("aten::sym_"):
            return func(*args, **kwargs)
        formula = None if _is_whole(func) else formulas().get(func)
        if formula is not None:
            with self:
                made = formula(*args, **kwargs)
            if made is not NotImplemented:
                return made
        elif implements_composite(func) and not _is_whole(func):
            with self:
                made = composite_kernel(func, *args, **kwargs)
            if made is not NotImplemented:
                return made
        with python_kernels() if self.symbolic else nullcontext():  # some in C++ take symbolic sizes for numbers
            result = func(*args, **kwargs)
        given_args, given_kwargs = pytree.tree_map_only((torch.Tensor, *SYMBOLIC), self._operand, (args, kwargs))
        name = func.overloadpacket.__name__
        node = self.graph.create_node("call_function", func, given_args, given_kwargs, name=name)
        told = {} if self.current is None else self.current.meta
        node.meta = {key: told[key] for key in _HANDED_ON if key in told}
        node.meta["val"] = result
        if isinstance(result, torch.Tensor):
            self._noted(result, node)
        elif isinstance(result, list | tuple):
            for place, each in enumerate(result):
                if isinstance(each, torch.Tensor):
                    item = self.graph.call_function(getitem, (node, place))
                    item.meta = {**node.meta, "val": each}
                    self._noted(each, item)
        return result

    def _operand(self, value: Any) -> Any:
        return self._nodes[id(value)][1] if isinstance(value, torch.Tensor) else self.sizes.of(value)


class _Proxied(NamedTuple):
    node: fx.Node


class _Tracked(NamedTuple):
    proxy: _Proxied
