"""``torch.compile(model, backend="tvm_dispatch")``: every graph that Dynamo finds, forward and backward, in TVM.

Dynamo calls a backend with a graph of torch calls whose inputs are everything from outside: arguments, parameters,
buffers. That graph is captured as a module would be (:mod:`bridge.capture`), when it is first called, so random draws
and in-place updates of buffers are eager's. A graph that cannot be had exactly runs as Dynamo's own ``"eager"``
backend would run it; :func:`graphs` tells which do, how often, and why.

Sizes: Dynamo makes a size symbolic when it sees a second value. Compiled code here has static shapes, so such a graph
is compiled once for each combination of sizes, at most ``MAX_ENTRIES`` of them.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import tvm
from torch import fx, nn

from bridge.dispatch import MAX_ENTRIES, refuse_state
from bridge.dynamo_graph import DynamoGraph, inline_checkpoints
from bridge.entry import Entry
from bridge.errors import Unsupported, UnsupportedModule, user_line
from bridge.guards import interpreter_state
from bridge.lower import DEFAULT_PARTITION
from bridge.reuse import lower_once
from bridge.stats import DispatchStats
from bridge.tracing import is_capturing, one_capture_at_a_time
from partition.cut import resolve as resolve_strategy

__all__ = ["CompiledGraph", "graphs", "tvm_dispatch"]

log = logging.getLogger("bridge.dynamo")

_OPTIONS = ("partition", "target")
_serial = itertools.count()
_GRAPHS: weakref.WeakValueDictionary[int, CompiledGraph] = weakref.WeakValueDictionary()


def tvm_dispatch(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """The backend, as Dynamo calls it; users write ``torch.compile(model, backend="tvm_dispatch")``.

    Args:
        graph_module: Dynamo's graph.
        example_inputs: not looked at: the graph is compiled for the inputs of its first call.
        mode: must be ``None`` or ``"default"``.
        options: ``{"partition": …, "target": …}``, as the arguments of :func:`bridge.add_tvm_dispatch`.

    Raises:
        ValueError: an unknown mode, option or partition.
    """
    if mode not in (None, "default"):
        raise ValueError(f"backend 'tvm_dispatch' has no mode {mode!r}; wanted none, or 'default'")
    options = dict(options or {})
    if unknown := sorted(set(options) - set(_OPTIONS)):
        raise ValueError(f"backend 'tvm_dispatch': unknown options {unknown}; wanted some of {list(_OPTIONS)}")
    partition = options.get("partition", DEFAULT_PARTITION)
    resolve_strategy(partition)
    target = tvm.target.Target(options["target"]) if options.get("target") is not None else None
    inline_checkpoints(graph_module)
    return CompiledGraph(graph_module, partition=partition, target=target)


def graphs() -> list[CompiledGraph]:
    """Every graph of this process that the backend was given and that Dynamo still holds, oldest first.

    ``torch.compiler.reset()`` lets go of all of them.
    """
    return [graph for _, graph in sorted(_GRAPHS.items())]


class CompiledGraph:
    """One of Dynamo's graphs. Called with its inputs, it finds the entry that fits, or runs the graph eager.

    Attributes:
        name: ``"graph 3"``, in the order in which Dynamo found them.
        where: the user's first source line in it, or ``None``.
        stats: hits; misses with their reasons; entries.
    """

    def __init__(self, graph_module: fx.GraphModule, *, partition: Any, target: Any):
        serial = next(_serial)
        lines = (user_line(node.meta.get("stack_trace")) for node in graph_module.graph.nodes)
        self.name = f"graph {serial}"
        self.where = next((line for line in lines if line), None)
        self.stats = DispatchStats()
        self._graph_module = graph_module
        self._partition = partition
        self._target = target
        self._compiled: dict[tuple, _Compiled | str] = {}
        _GRAPHS[serial] = self

    def __repr__(self) -> str:
        return f"{self.name} ({self.where or 'no source line'}): {self.stats!r}"

    def __call__(self, *inputs: Any) -> Any:
        if is_capturing() or torch.compiler.is_compiling():
            return self._graph_module(*inputs)
        key = (interpreter_state(), *map(_layout, inputs))
        compiled = self._compiled.get(key)
        if compiled is None and len(self._compiled) < MAX_ENTRIES:
            compiled = self._compiled[key] = self._compile(inputs)
        if compiled is None:
            compiled = self._give_up()
        reason = compiled if isinstance(compiled, str) else compiled.objection(inputs)
        if reason is not None:
            self.stats.misses[reason] += 1
            return self._graph_module(*inputs)
        self.stats.hits += 1
        return compiled(inputs)

    def _compile(self, inputs: Sequence[Any]) -> _Compiled | str:
        """Compiled for these inputs, or the reason why it cannot be, which is logged."""
        try:
            refuse_state(self.name)
            compiled = _Compiled(self._graph_module, inputs, self._partition, self._target)
        except UnsupportedModule as refusal:
            reason = "; ".join(dict.fromkeys(f"{problem.op}: {problem.reason}" for problem in refusal.ops))
            log.warning("%s (%s) runs eager: %s", self.name, self.where or "no source line", reason)
            return reason
        self.stats.entries.append(compiled.entry)
        return compiled

    def _give_up(self) -> str:
        reason = f"more than {MAX_ENTRIES} combinations of sizes, layouts and modes"
        if reason not in self.stats.misses:
            log.warning("%s (%s) runs eager where it was not compiled yet: %s", self.name, self.where, reason)
        return reason


class _Compiled:
    """A graph compiled for inputs of one layout."""

    def __init__(self, graph_module: fx.GraphModule, inputs: Sequence[Any], partition: Any, target: Any):
        _refuse(graph_module, inputs)
        region = DynamoGraph(graph_module, inputs)
        arguments = tuple(inputs[position] for position in region.arguments)
        with one_capture_at_a_time:
            lowered = lower_once(region, arguments, {}, grad=torch.is_grad_enabled(), partition=partition)
        captured = lowered.captured
        self.entry = Entry(None, lowered, target)
        self._owned = [
            (None, region.input_of[spec.name])
            if spec.name in region.input_of
            else (graph_module, spec.name.removeprefix("graph_module."))
            for spec in captured.module_tensors
        ]
        tensors = [position for position in region.arguments if isinstance(inputs[position], torch.Tensor)]
        self._places = tensors
        self._mutated = [self._owned[index][1] for index, _ in captured.mutated if self._owned[index][0] is None]

    def __call__(self, inputs: Sequence[Any]) -> Any:
        owned = [inputs[where] if owner is None else _attribute(owner, where) for owner, where in self._owned]
        return self.entry(owned + [inputs[place] for place in self._places])

    def objection(self, inputs: Sequence[Any]) -> str | None:
        """Why these inputs cannot be run although their layout fits: an in-place change that others would see."""
        for mutated in self._mutated:
            memory = inputs[mutated].untyped_storage()._cdata
            for position, value in enumerate(inputs):
                if position != mutated and isinstance(value, torch.Tensor):
                    if value.untyped_storage()._cdata == memory:
                        return f"input {mutated} is changed in place and shares its memory with input {position}"
        return None


def _refuse(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> None:
    problems = [
        Unsupported(str(node.target), user_line(node.meta.get("stack_trace")) or node.name, "a higher-order operator")
        for node in graph_module.graph.nodes
        if isinstance(node.target, torch._ops.HigherOrderOperator)
    ]
    problems += [
        Unsupported(f"input {position}", "the graph's inputs", "a lazily negated or conjugated tensor")
        for position, value in enumerate(inputs)
        if isinstance(value, torch.Tensor) and (value.is_neg() or value.is_conj())
    ]
    if problems:
        raise UnsupportedModule("DynamoGraph", problems)


def _layout(value: Any) -> Any:
    """What must be the same for a call to fit an entry: of a tensor its layout, of anything else the value."""
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


def _attribute(owner: nn.Module, path: str) -> torch.Tensor:
    value: Any = owner
    for part in path.split("."):
        value = getattr(value, part)
    return value
