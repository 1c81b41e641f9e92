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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from bridge.base.devices import function_modes, function_modes_aside
from bridge.base.errors import CompilationError, GuardFailure, UnsupportedModule, user_line
from bridge.base.lru import LeastRecentlyUsed
from bridge.base.threads import interrupts_deferred
from bridge.capture import is_traced_here
from bridge.compile import Backend, backend_for
from bridge.dispatch import MAX_BOUND, MAX_ENTRIES, DispatchStats, Entries, interpreter_state, require_capturable
from bridge.dynamo.compiled import Compiled, brief, layout
from bridge.dynamo.graph import inline_checkpoints, numbers_of, read_directly, sizes_of
from bridge.lowering import DEFAULT_PARTITION
from partition.cut import resolve as resolve_strategy

__all__ = ["CompiledGraph", "graphs", "tvm_dispatch"]

log = logging.getLogger("bridge.dynamo")

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
    """One of Dynamo's graphs. A call runs the matching entry, or the graph in eager.

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
        self._entries = Entries()
        self.stats = DispatchStats(self._entries)
        self._graph_module = graph_module
        self._partition = partition
        self._backend = backend
        self._max_entries = max_entries
        self._numbers = numbers_of(graph_module.graph)
        self._dynamic: frozenset[int] = frozenset()
        self._compiled: dict[tuple, Compiled | str] = {}
        sizes = sizes_of(graph_module.graph)
        self._sizes = sizes if sizes.dims else None
        self._dynamic_sizes: list[tuple[Any, Compiled]] = []  # with the interpreter's state of each
        self._known_sizes = LeastRecentlyUsed[tuple, Compiled](MAX_BOUND)
        _GRAPHS[serial] = self

    def __repr__(self) -> str:
        return f"{self.name} ({self.where or 'no source line'}): {self.stats!r}"

    def __call__(self, *inputs: Any) -> Any:
        """Runs the entry for these inputs, compiling it if need be, or the graph in eager with a counted reason."""
        if is_traced_here():
            return self._graph_module(*inputs)
        if type(function_modes()) is int and function_modes():  # Dynamo has traced their effects
            with function_modes_aside():
                return self(*inputs)
        values = self._values(inputs)
        key = (*map(layout, values), interpreter_state())
        compiled = self._compiled.get(key)
        if compiled is None and self._sizes is not None:
            if dynamic := self._changed_numbers_of_any_size(values):
                self._dynamic |= dynamic
                return self(*inputs)
            compiled = self._of_any_size(key, values)
        if compiled is None and (dynamic := self._changed_numbers(key)):
            self._dynamic |= dynamic
            return self(*inputs)
        if compiled is None and len(self._compiled) < self._max_entries:
            compiled = self._compiled[key] = self._compile(values)
        if compiled is None:
            compiled = self._give_up()
        tried = 0
        while not isinstance(compiled, str) and (reason := compiled.objection(values)) is None:
            try:
                return compiled(values)
            except GuardFailure as failure:  # the forward program has changed nothing, so the call can begin anew
                tried += 1
                if compiled.other is None and failure.__cause__ is None and tried <= self._max_entries:
                    compiled.other = self._compile(values)
                compiled = failure.reason if failure.__cause__ else compiled.other or failure.reason
        self._entries.count_miss(compiled if isinstance(compiled, str) else reason)
        return self._graph_module(*inputs)

    def _drop(self, compiled: Compiled | str | None) -> None:
        """Drops an entry, and the entries for the other branches of its calls."""
        while isinstance(compiled, Compiled):
            self._entries.drop(compiled.entry)
            compiled = compiled.other

    def _of_any_size(self, key: tuple, values: Sequence[Any]) -> Compiled | None:
        """An existing or new entry with dynamic shapes for these inputs; ``None`` if there can be none."""
        found = self._known_sizes.get(key)
        if found is not None:
            return found
        found = next((each for state, each in self._dynamic_sizes if state == key[-1] and each.fits(values)), None)
        if found is None and len(self._dynamic_sizes) < self._max_entries:
            found = self._compile_for_sizes(values)
            if found is None:
                return None
            self._dynamic_sizes.append((key[-1], found))
        return None if found is None else self._known_sizes.put(key, found)

    def _changed_numbers_of_any_size(self, values: Sequence[Any]) -> frozenset[int]:
        """:meth:`_changed_numbers` for entries with dynamic shapes."""
        numbers = self._numbers.arithmetic - self._dynamic - self._sizes.numbers.keys()
        for known in list(self._dynamic_sizes) if numbers else ():
            differing = known[1].differing(values)
            if differing and differing <= numbers:
                self._dynamic_sizes.remove(known)
                self._known_sizes.clear()
                self._drop(known[1])
                return differing
        return frozenset()

    @interrupts_deferred()
    def _compile_for_sizes(self, values: Sequence[Any]) -> Compiled | None:
        """Compiles the graph for all sizes; ``None`` if that is refused, which is remembered."""
        try:
            with _outside_inference_mode():
                require_capturable(self.name)
                graph_module = read_directly(self._graph_module, self._numbers)
                compiled = Compiled(graph_module, values, self._partition, self._backend, self._sizes)
        except (UnsupportedModule, CompilationError) as error:
            why = brief(error) if isinstance(error, UnsupportedModule) else error
            log.info("%s (%s): every size gets an entry of its own: %s", self.name, self.where, why)
            self._sizes = None
            return None
        if not compiled.fits(values):
            self._sizes = None
            return None
        log.info("%s (%s) is compiled for sizes that vary: %s", self.name, self.where, compiled.entry.bound)
        self._entries.add(compiled.entry)
        return compiled

    def _values(self, inputs: Sequence[Any]) -> list[Any]:
        """The inputs, with tensors that the graph reads by ``.item()`` as numbers, and dynamic scalars as tensors."""
        values = list(inputs)
        for position in self._numbers.read - self._dynamic:
            values[position] = values[position].item()
        for position in self._dynamic - self._numbers.read:
            values[position] = torch.tensor(values[position])
        return values

    def _changed_numbers(self, key: tuple) -> frozenset[int]:
        """Positions of the numbers in which the call differs from an earlier entry, which is dropped; empty: no entry
        differs in numbers only."""
        numbers = self._numbers.arithmetic - self._dynamic
        for known in list(self._compiled) if numbers else ():
            differing = frozenset(i for i, (then, now) in enumerate(zip(known, key, strict=True)) if then != now)
            if differing <= numbers:
                self._drop(self._compiled.pop(known))
                return differing
        return frozenset()

    @interrupts_deferred()
    def _compile(self, inputs: Sequence[Any]) -> Compiled | str:
        """Compiles the graph for these inputs; the reason, which is logged, if it is unsupported."""
        try:
            with _outside_inference_mode():
                require_capturable(self.name)
                graph_module = read_directly(self._graph_module, self._numbers)
                compiled = Compiled(graph_module, inputs, self._partition, self._backend)
        except UnsupportedModule as error:
            reason = brief(error)
            log.warning("%s (%s) runs eager: %s", self.name, self.where or "no source line", reason)
            return reason
        self._entries.add(compiled.entry)
        return compiled

    def _give_up(self) -> str:
        reason = f"more than {self._max_entries} combinations of sizes, layouts and modes"
        if reason not in self._entries.misses:
            log.warning(
                "%s (%s) runs eager where it was not compiled yet: %s. Pad or bucket the calls, or allow more of them "
                "with options={'max_entries': ...}.",
                self.name,
                self.where or "no source line",
                reason,
            )
        return reason


@contextmanager
def _outside_inference_mode() -> Iterator[None]:
    """Context for compiling: replaces inference mode by ``no_grad``; at run time, results are inference tensors."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield
