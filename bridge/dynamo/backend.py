"""``torch.compile(model, backend="tvm_dispatch")``: a graph of Dynamo's → a callable that runs it in TVM.

A graph's inputs are arguments, parameters and buffers. The graph is captured like a module
(:mod:`bridge.capture.record_call`) at its first call, so random draws and in-place updates of buffers are eager's. A
graph that cannot be compiled exactly runs as in Dynamo's own ``"eager"`` backend; :func:`graphs` reports these calls
with reasons.

Dynamo makes a size symbolic when it sees a second value. The graph is then compiled once for all sizes
(:mod:`bridge.dynamo.graph`), or if that is refused, once per combination of sizes, at most ``max_entries`` times.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from bridge.base.devices import function_modes, function_modes_aside
from bridge.base.errors import CompilationError, GuardFailure, Unsupported, UnsupportedModule, user_line
from bridge.base.threads import interrupts_deferred
from bridge.capture import is_traced_here
from bridge.compile import Backend, backend_for
from bridge.dispatch import MAX_ENTRIES, Dispatcher, DispatchOptions
from bridge.dynamo.graph import DynamoGraph, inline_checkpoints, problems_of
from bridge.lowering import DEFAULT_PARTITION
from bridge.state import SampleCall
from partition.cut import resolve as resolve_strategy

__all__ = ["CompiledGraph", "graphs", "tvm_dispatch"]

log = logging.getLogger("bridge.dynamo")

#: Most reasons per graph, and operators per reason, that a message lists.
MAX_REASONS = 3
_OPTIONS = ("partition", "target", "max_entries")
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
        example_inputs: ignored: the graph is compiled for the inputs of its first call.
        mode: must be ``None`` or ``"default"``.
        options: ``{"partition": …, "target": …}``, as the arguments of :func:`bridge.add_tvm_dispatch`; and
            ``"max_entries"``: the number of combinations of sizes, layouts and modes to compile each graph for (8);
            calls with any other combination run eager.

    Raises:
        ValueError: an unknown mode, option or partition, or ``max_entries`` is not a positive int.

    Example:
        >>> compiled = torch.compile(model, backend="tvm_dispatch", options={"max_entries": 4})
        >>> compiled(x).sum().backward()
        >>> print(bridge.dynamo.graphs())
    """
    if mode not in (None, "default"):
        raise ValueError(f"backend 'tvm_dispatch' has no mode {mode!r}; wanted none, or 'default'")
    options = dict(options or {})
    if unknown := sorted(set(options) - set(_OPTIONS)):
        raise ValueError(f"backend 'tvm_dispatch': unknown options {unknown}; wanted some of {list(_OPTIONS)}")
    partition = options.get("partition", DEFAULT_PARTITION)
    resolve_strategy(partition)
    target = options.get("target")
    backend = None if target is None else backend_for(target)
    max_entries = options.get("max_entries", MAX_ENTRIES)
    if type(max_entries) is not int or max_entries < 1:
        raise ValueError(f"backend 'tvm_dispatch': wanted max_entries of 1 or more, got {max_entries!r}")
    inline_checkpoints(graph_module)
    return CompiledGraph(graph_module, partition=partition, backend=backend, max_entries=max_entries)


def graphs() -> list[CompiledGraph]:
    """Every graph that the backend got and Dynamo still holds, oldest first; ``torch.compiler.reset()`` frees them."""
    return [graph for _, graph in sorted(_GRAPHS.items())]


class CompiledGraph:
    """One of Dynamo's graphs. A call runs the matching entry of the graph's dispatcher, or the graph in eager.

    Attributes:
        name: ``"graph 3"``, in the order of compilation.
        where: the user's first source line in it, or ``None``.
        stats: hits; misses with their reasons; entries.
    """

    def __init__(self, graph_module: fx.GraphModule, *, partition: Any, backend: Backend | None, max_entries: int):
        serial = next(_serial)
        lines = (user_line(node.meta.get("stack_trace")) for node in graph_module.graph.nodes)
        self.name = f"graph {serial}"
        self.where = next((line for line in lines if line), None)
        self._graph_module, self._region = graph_module, DynamoGraph(graph_module)
        options = DispatchOptions(partition, "compile", backend, cuda_graphs=False)
        self._dispatcher = _GraphDispatcher(self._region, options, self._told, max_entries)
        self.stats = self._dispatcher.stats
        self._is_sized = bool(self._region.sizes.dims)
        problems = problems_of(graph_module)
        self._refused = brief(problems) if problems else None
        if problems:
            log.warning("%s runs eager: %s", self._told, self._refused)
        _GRAPHS[serial] = self

    @property
    def _told(self) -> str:
        return f"{self.name} ({self.where or 'no source line'})"

    def __repr__(self) -> str:
        return f"{self._told}: {self.stats!r}"

    def __call__(self, *inputs: Any) -> Any:
        """Runs the entry for these inputs, compiling it if need be, or the graph in eager with a counted reason."""
        if is_traced_here():
            return self._graph_module(*inputs)
        if type(function_modes()) is int and function_modes():  # Dynamo has traced their effects
            with function_modes_aside():
                return self(*inputs)
        if self._refused is not None:
            self._dispatcher.entries.count_miss(self._refused)
            return self._graph_module(*inputs)
        given = self._region.given(inputs)
        if self._is_sized:
            self._is_sized = False
            self._compile_for_sizes(given)
        return self._dispatcher.dispatch(self._region, given, {}, lambda *_: self._graph_module(*inputs))

    @interrupts_deferred()
    def _compile_for_sizes(self, given: tuple) -> None:
        """Compiles the graph for all sizes, unless that is refused."""
        call = SampleCall(self._region, given, {}, self._region.dynamic_dims(given))
        try:
            entry = self._dispatcher.add(call)
        except (UnsupportedModule, CompilationError) as error:
            why = brief(error.ops) if isinstance(error, UnsupportedModule) else error
            log.info("%s: every size gets an entry of its own: %s", self._told, why)
            return
        if entry.bound is None:
            log.info("%s: every size gets an entry of its own", self._told)
        else:
            log.info("%s is compiled for sizes that vary: %s", self._told, entry.bound)


class _GraphDispatcher(Dispatcher):
    """The dispatcher of a graph: keeps its entries, of which there are at most ``most``.

    Args:
        told: the graph, for messages.
    """

    def __init__(self, region: DynamoGraph, options: DispatchOptions, told: str, most: int):
        super().__init__(region, options)
        self._told, self.most, self.measures = told, most, False
        self.on_refused = self._refuse

    def _may_compile(self, name: str, failure: GuardFailure) -> bool:
        may_replace = failure.field.startswith("value of argument")  # an entry with the number as an input
        return (may_replace or len(self.entries.all) < self.most) and super()._may_compile(name, failure)

    def _miss(self, call: SampleCall, found: GuardFailure, eager: Any) -> Any:
        reason = self.entries.refused.get(found.reason)
        if reason is None and found.__cause__ is None and len(self.entries.all) >= self.most:
            reason = self._full()
        return super()._miss(call, found if reason is None else GuardFailure(found.stage, reason), eager)

    def _refuse(self, reason: str, why: object) -> None:
        if isinstance(why, CompilationError):
            raise why
        told = brief(why.ops) if isinstance(why, UnsupportedModule) else f"{reason}: {why}"
        self.entries.refused[reason] = told
        log.warning("%s runs eager: %s", self._told, told)

    def _full(self) -> str:
        reason = f"more than {self.most} combinations of sizes, layouts and modes"
        if reason not in self.entries.misses:
            log.warning(
                "%s runs eager where it was not compiled yet: %s. Pad or bucket the calls, or allow more of them "
                "with options={'max_entries': ...}.",
                self._told,
                reason,
            )
        return reason


def brief(problems: Sequence[Unsupported]) -> str:
    """Problems on one line: an optimizer's step may change hundreds of parameters in place."""
    ops: dict[str, list[str]] = {}
    for problem in problems:
        ops.setdefault(problem.reason, []).append(problem.op)
    reasons = [f"{_some(list(dict.fromkeys(names)), ', ')}: {reason}" for reason, names in ops.items()]
    return _some(reasons, "; ")


def _some(words: list[str], separator: str) -> str:
    more = [f"and {len(words) - MAX_REASONS} more"] if len(words) > MAX_REASONS else []
    return separator.join(words[:MAX_REASONS] + more)
