"""The compiler's pipeline: a Relax function in flat form → a :class:`~bridge.compile.runtime.program.Program`.

    translate     Relax → layout-agnostic loop graph                  bridge.compile.translate
    name          GELU of half types by the normal distribution       bridge.compile.passes.patterns
    moments       variances of columns by sums of squares             bridge.compile.passes.patterns
    pad           large products of misaligned rows, on a GPU         bridge.compile.passes.pad_products
    choose        memory layouts, algorithms of products              bridge.compile.passes.choose_layouts
    optimize      loop graph → loop graph, pass by pass               bridge.compile.passes
    fuse          loop graph → groups                                 bridge.compile.schedule.fuse
    generate      groups → row plans → PrimFuncs                      bridge.compile.schedule.row_plan, .backend
    build         PrimFuncs → machine code, in the background         bridge.compile.runtime.build
    plan          instructions over torch-owned memory                bridge.compile.runtime.link

:func:`compile_function` runs all stages, :class:`Compilation` in two parts; equal functions share a live program.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from operator import itemgetter
from weakref import WeakValueDictionary

from tvm_ffi import structural_equal, structural_hash

from autodiff import collectives_in_order
from autodiff.extents import Extent, ExtentScope
from autodiff.ir import Function, bindings
from autodiff.scan import Scan, turned_inside
from bridge.artifact import current_store, of_this_package
from bridge.base.log import Stopwatch, channel
from bridge.base.session import SESSION
from bridge.base.threads import free_in_children, raise_deferred, renewed_in_children
from bridge.compile.backend import Backend
from bridge.compile.loop_ir.graph import Graph, LoopCall, eliminate_dead_code
from bridge.compile.options import CompileOptions
from bridge.compile.passes.cheap import cast_where_read, count_where_read, recompute_row_values
from bridge.compile.passes.choose_layouts import (
    choose_layouts,
    make_walkable,
    recompute_permutations,
)
from bridge.compile.passes.pad_products import pad_products
from bridge.compile.passes.patterns import (
    add_moments_at_once,
    generate_lookups,
    generate_pool_gradients,
    name_normal_functions,
)
from bridge.compile.passes.sections import recompute_sections, recompute_slices
from bridge.compile.runtime.build import WeakCache
from bridge.compile.runtime.instructions import CallLibrary
from bridge.compile.runtime.link import assemble
from bridge.compile.runtime.loop_frame import inner_steps
from bridge.compile.runtime.program import Program
from bridge.compile.runtime.storage import keep_program, kept_program
from bridge.compile.schedule.products import ProductPolicy
from bridge.compile.signature import KeptFunction, digest_of, size_signature
from bridge.compile.targets import backend_for
from bridge.compile.translate import DrawnMask, translate

__all__ = ["Compilation", "compile_function", "optimize"]

PASSES: tuple[Callable[[Graph, Backend], Graph], ...] = (
    generate_lookups,  # first: later passes see its copies
    recompute_permutations,
    recompute_slices,
    cast_where_read,
    count_where_read,
    make_walkable,
    recompute_sections,
    recompute_row_values,
    generate_pool_gradients,
    eliminate_dead_code,
)
"""Passes over a graph whose layouts are chosen, in order. None changes a bit of any value."""

_PROGRAMS: WeakCache[Function, Program] = SESSION.cache(
    "programs", WeakCache(lambda a, b: structural_equal(a, b, map_free_vars=True))
)
_KEPT: WeakValueDictionary[str, Program] = SESSION.cache("programs", WeakValueDictionary())
"""Programs in use that the disk cache holds or will hold, by their keys there."""
_BODIES: WeakValueDictionary[tuple, _LoopBody] = SESSION.cache("programs", WeakValueDictionary())
"""Loop bodies in use, by options, text and number of constants."""
_LOCK = free_in_children(threading.Lock())

log, fallbacks_log = channel("compile"), channel("fallbacks")


def compile_function(
    func: Function, *, name: str, options: CompileOptions | None = None, drawn: Mapping[int, DrawnMask] | None = None
) -> Program:
    """Compile a function in flat form (see :mod:`autodiff.ir`).

    A function with symbolic extents gives one program for all sizes: :meth:`Program.bind` makes the runnable instance.
    Conclusions about the sizes become guards of their scope.

    While a program is in use, equal functions share it; it keeps the ``name`` of its first compilation. ``options``
    default to the current ones for this CPU. Raises ``NotImplementedError`` naming an operator that is unsupported.

    ``drawn``: place → dropout mask that kernels recompute from the generator's seed and offset (int64) in its place.

    No bit of a value depends on which other values are results: see :mod:`bridge.compile.schedule.fuse`.
    """
    return Compilation(func, name, options, drawn).finish()


class Compilation:
    """One compilation in two parts: the constructor makes the graph and times products, :meth:`finish` the program.

    Construct all compilations before finishing one: :meth:`finish` builds machine code in the background, which would
    disturb timings. Arguments and exceptions: see :func:`compile_function`. A :class:`KeptFunction` is read
    only if the disk cache lacks its program.
    """

    def __init__(
        self,
        func: Function | KeptFunction,
        name: str,
        options: CompileOptions | None = None,
        drawn: Mapping[int, DrawnMask] | None = None,
    ):
        self._options = CompileOptions.current(backend_for(None)) if options is None else options
        self._name = name
        backend, self._is_to_keep = self._options.backend, False
        policy = self._policy = backend.products(self._options.threads, self._options.deterministic)
        self._kept_key = None
        if isinstance(func, KeptFunction):
            self._program = self._kept(func.digest, drawn)
            if self._program is not None:
                return
            func = func.read()
        self._func = func
        self._signature = size_signature(func)
        self._key = (self._options.key, structural_hash(func, map_free_vars=True), self._signature, _in_order(drawn))
        with _LOCK:
            self._program = _PROGRAMS.get(self._key, func)
        if self._program is not None:
            # kept under the key of an equal function of another lowering: later processes look up this one's
            self._is_to_keep = self._kept_key is not None
            return
        raise_deferred()
        if self._kept_key is None and self._signature.scope is None and current_store().is_usable:
            with suppress(ValueError):  # a literal without a text
                self._program = self._kept(digest_of(func), drawn)
        if self._program is not None:
            self._share()
            return
        watch = Stopwatch()
        self._graphs = _Graphs(collectives_in_order(func), self._options, policy, drawn)
        self._seconds = watch.seconds

    def finish(self) -> Program:
        """The program; its machine code may still be building."""
        if self._program is None:
            program = self._graphs.program(self._name, self._seconds, self._signature.scope)
            self._program = replace(program, ways=self._policy.made())
            self._is_to_keep = True
            _tell(self._program)
            self._share()
        return self._program

    def keep(self) -> None:
        """Writes a program that is new, or new under its key, to the disk cache; waits for its machine code."""
        if self._is_to_keep and self._kept_key is not None:
            self._is_to_keep = False
            keep_program(self._kept_key, self._digest, self._program)

    def _kept(self, digest: str, drawn: Mapping[int, DrawnMask] | None) -> Program | None:
        """The program of a digest from this process or from the disk cache; ``None`` if neither has it."""
        masks = [(place, mask.rate, mask.width, mask.threads) for place, mask in _in_order(drawn)]
        if any(isinstance(threads, Extent) for *_, threads in masks):  # dynamic: not kept on disk
            return None
        self._digest, self._kept_key = digest, of_this_package(digest, self._options.key, masks)
        with _LOCK:
            found = _KEPT.get(self._kept_key)
        if found is None:
            found = kept_program(self._kept_key, self._options.backend, self._policy.adopt)
            if found is not None:
                with _LOCK:
                    found = _KEPT.setdefault(self._kept_key, found)
        return found

    def _share(self) -> None:
        with _LOCK:
            _PROGRAMS.put(self._key, self._func, self._program)
            if self._kept_key is not None:
                _KEPT[self._kept_key] = self._program


def _in_order(drawn: Mapping[int, DrawnMask] | None) -> tuple[tuple[int, DrawnMask], ...]:
    return tuple(sorted((drawn or {}).items(), key=itemgetter(0)))


class _Graphs:
    """A function's loop graph, and the graphs of its loops' bodies by text. All share one product policy."""

    def __init__(
        self,
        func: Function,
        options: CompileOptions,
        policy: ProductPolicy,
        drawn: Mapping[int, DrawnMask] | None = None,
        lasting: int = 0,
        is_step: bool = False,
    ):
        """``lasting``: see :func:`~bridge.compile.passes.choose_layouts.choose_layouts`; ``is_step``: a loop's body.

        Equal bodies share one program for any number of steps. This policy adopts the choices of a body's own policy.
        """
        self._func, self._policy = func, policy
        self._backend = options.backend.of_steps if is_step else options.backend
        func = turned_inside(func) if policy.turns else func
        neutral = name_normal_functions(
            translate(func, self._backend, drawn, dict(options.given_orders)), self._backend
        )
        neutral = add_moments_at_once(neutral, self._backend)
        neutral = pad_products(neutral, policy.unit)
        counts = options.grad_outs, options.constants, lasting
        placed = choose_layouts(neutral, self._backend, policy, *counts, dict(options.orders))
        self._graph = optimize(placed, self._backend)
        inside = replace(options, grad_outs=0, constants=0, orders=(), given_orders=())
        scans = [node.scan for node in self._graph.nodes if isinstance(node, LoopCall)]
        self._bodies = {scan.body: _body(scan, inside, policy) for scan in scans}

    def program(self, name: str, seconds: float, scope: ExtentScope | None = None) -> Program:
        """Assembles the program; ``seconds``: the time that making the graphs took."""
        bodies = {text: body.program(f"{name}_step") for text, body in self._bodies.items()}
        variables = tuple(str(var.name) for var in (*self._func.params, *(var for var, _ in bindings(self._func))))
        made = assemble(self._graph, name, self._backend, {"translate": seconds}, variables, scope, bodies)
        return replace(made, bodies=tuple(self._bodies.values())) if bodies else made


class _LoopBody:
    """The body of loops of any length, compiled on first request."""

    def __init__(self, scan: Scan, options: CompileOptions):
        policy = options.backend.products(options.threads, options.deterministic)
        self.graphs = _Graphs(scan.function, options, policy, lasting=scan.constants, is_step=True)
        self.choices = policy.made()
        self._lock, self._program = renewed_in_children(threading.Lock()), None

    def program(self, name: str) -> Program:
        """The body's program; the first request names it."""
        with self._lock:
            if self._program is None:
                self._program = self.graphs.program(name, 0.0)
            return self._program


def _body(scan: Scan, options: CompileOptions, policy: ProductPolicy) -> _LoopBody:
    """The body of a scan; shares one that is in use."""
    key = options.key, scan.body, scan.constants
    with _LOCK:
        found = _BODIES.get(key)
    if found is None:
        found = _LoopBody(scan, options)
        with _LOCK:
            found = _BODIES.setdefault(key, found)
    policy.adopt(found.choices)
    return found


def optimize(graph: Graph, backend: Backend) -> Graph:
    """The graph after :data:`PASSES`."""
    for each in PASSES:
        graph = each(graph, backend)
    return graph


def _tell(program: Program) -> None:
    """Logs the compiled program, and the calls left to torch."""
    log.info("%s", program.headline)
    if log.isEnabledFor(logging.DEBUG):
        log.debug("%s", str(program).partition("\n")[2])
    by_torch = Counter(step.name for step in inner_steps(program.steps) if isinstance(step, CallLibrary))
    if by_torch:
        told = ", ".join(f"{count} x {name}" for name, count in by_torch.most_common())
        fallbacks_log.info("%s: torch computes %s", program.name, told)
