"""The dispatcher of a module: a call → the matching entry, or eager with a counted reason.

It is stored like the callable of ``nn.Module.compile()``, in the instance attribute ``_compiled_call_impl``, which
``nn.Module.__call__`` reads first and ``nn.Module.__getstate__`` drops, so copies and pickles are plain modules.

Hooks: torch runs them in ``nn.Module._call_impl``, around ``self.forward``. To replace that forward without touching
the module, which other threads may be calling, ``_call_impl`` runs on a shell: an object with all the module's state,
the new forward, and the module's hooks, each of which is called with the module itself.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from bridge.base.errors import (
    INTERPRETER,
    RUN,
    CacheNotFilled,
    CompilationError,
    DispatchMiss,
    UnsupportedModule,
    is_refused_by_eager,
    swallowed,
)
from bridge.base.log import channel
from bridge.base.threads import interrupts_deferred, raise_deferred, renewed_in_children
from bridge.base.torch_internals import (
    MODULE_FILE,
    MODULE_HOOKS,
    compiling_flag,
    has_global_hooks,
    is_exporting,
    jit_is_tracing,
)
from bridge.capture import ALL_COUNTS, CAPTURES, DynamicDim, LoopedCall, is_traced_here, same_numbers, uninitialized
from bridge.compile import Backend, Mode, RecordedGraphs
from bridge.dispatch.automatic_dynamic import AutomaticDynamicShapes
from bridge.dispatch.compile_entry import backend_of_call, compile_entry, require_capturable
from bridge.dispatch.entries import CompileBudget, DispatchStats, Entries, advice, no_entry
from bridge.dispatch.entry import Entry, EntryOptions
from bridge.dispatch.guards import GuardFailure, active_modes
from bridge.dispatch.outer_compiler import call_opaque, hide
from bridge.dispatch.profitability import TOO_SMALL, measure_profitability
from bridge.state import SampleCall

__all__ = ["MAX_ENTRIES", "DispatchOptions", "Dispatcher", "call_with_hooks"]


class _HooksOf(Mapping):
    """View of a dictionary of hooks, in which each hook is called with ``module``, whichever module calls it."""

    def __init__(self, module: nn.Module, hooks: Mapping[int, Callable[..., Any]]):
        self._module = module
        self._hooks = hooks

    def __getitem__(self, key: int) -> Callable[..., Any]:
        module, hook = self._module, self._hooks[key]
        return lambda _, *rest: hook(module, *rest)

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._hooks))

    def __len__(self) -> int:
        return len(self._hooks)


class _Shell(nn.Module):
    def __init__(self, module: nn.Module, forward: Callable[..., Any]):
        attributes = self.__dict__
        attributes.update(module.__dict__)
        for kind in MODULE_HOOKS:
            attributes[kind] = _HooksOf(module, attributes[kind])
        attributes["forward"] = forward


def call_with_hooks(module: nn.Module, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """``module(*args, **kwargs)`` with ``forward`` in place of its forward; runs the module's and the global hooks."""
    return _Shell(module, forward)._call_impl(*args, **kwargs)


log, guards_log = channel("dispatch"), channel("guards")

Match = tuple[Entry, list[torch.Tensor]] | GuardFailure
"""The entry that serves a call and its inputs, or the condition that the closest entry fails."""

#: Most entries that ``on_miss="compile"`` keeps; the least recently used one is dropped.
MAX_ENTRIES = 8
#: The limit if the newest entry has loops: each length has an entry, which compiles no kernels.
MAX_LOOPED_ENTRIES = 64
#: Most unsupported calls that ``on_miss="compile"`` remembers, in order not to try them again.
MAX_UNSUPPORTED = 64
#: Seconds of compiling at a call from which on one warning says so.
LONG_COMPILATION = 10
#: Consecutive misses for the same cause, before any hit, after which a warning says that no call matches.
MISSES_BEFORE_WARNING = 3


@dataclass(frozen=True)
class DispatchOptions:
    """The checked options of :func:`bridge.dispatch.api.add_tvm_dispatch`.

    Attributes:
        backend: ``None``: the backend of the device of each call's tensors.
        freeze: whether the module's tensors become constants of programs for calls without gradients.
        divide: dispatches submodules of a module whose random draws select the code to run
            (:func:`bridge.dispatch.parts.add_parts`); ``None``: the module is compiled for the call's selection.
    """

    partition: Any
    on_miss: str
    backend: Backend | None = None
    freeze: bool = False
    cuda_graphs: Mode = "auto"
    divide: Callable[[SampleCall, UnsupportedModule, DispatchOptions], None] | None = None


class Dispatcher:
    """Replaces a module's call: runs the matching entry, or eager, with a counted reason.

    Attributes:
        entries: the entries and the misses; ``stats``: the user's view of them.
        options: the user's options; :meth:`take` sets them.
        graphs: control and statistics of the programs' CUDA graphs.
        most: most entries that misses add; the least recently used one is dropped.
        measures: whether to time a small entry beside eager.
        learns: whether to compile the next call that misses whatever ``on_miss`` is, since there was no sample.
        on_refused: if set, called instead of a warning with the guard that a call fails and the reason why no entry
            serves it; also for failures of the compiler, after which the call runs eager.
    """

    def __init__(self, module: nn.Module, options: DispatchOptions):
        self._module = weakref.ref(module)  # the module owns its dispatcher, not the other way round
        self.options = options
        self.most, self.learns, self.measures = MAX_ENTRIES, False, True
        self.on_refused: Callable[[str, object], None] | None = None
        self.entries = Entries()
        self.graphs = RecordedGraphs(options.cuda_graphs)
        self.stats = DispatchStats(self.entries, self.graphs, lambda: self._compiles)
        self.budget = CompileBudget()
        self._automatic_dynamic = AutomaticDynamicShapes(self.entries, self._added, self._options)
        self._said, self._misses = Counter[Any](), ("", 0)
        self._adding = renewed_in_children(threading.RLock())

    def _first(self, what: Any) -> bool:
        """Whether this is the first message or attempt with that key."""
        self._said[what] += 1
        return self._said[what] == 1

    def take(self, options: DispatchOptions) -> None:
        """Replaces the options."""
        self.options, self.graphs.mode = options, options.cuda_graphs

    @property
    def _compiles(self) -> bool:
        return self.options.on_miss == "compile" or self.learns

    @hide
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's call: handles copies of the module, traces and hooks, then dispatches."""
        module = self._module()
        is_dynamo = is_dynamo_compiling()
        if not is_dynamo:  # Dynamo does not support sys._getframe
            caller = sys._getframe(1)
            if caller.f_globals is MODULE_FILE and (called := caller.f_locals.get("self", module)) is not module:
                return called._call_impl(*args, **kwargs)  # a copy that took over __dict__: its weights are its own
        if module is None:
            raise ReferenceError("the dispatched module is gone")
        if is_dynamo or CAPTURES.depth or compiling_flag() or jit_is_tracing():
            if is_dynamo and not is_exporting():
                return call_opaque(self, args, kwargs)
            if is_traced_here():
                return module._call_impl(*args, **kwargs)
        if (
            module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
        ) and not has_global_hooks():
            if module._backward_hooks and not module._is_full_backward_hook:
                return self._miss(SampleCall(module, args, kwargs), _OLD_HOOK, module._call_impl)
            inside = lambda *args, **kwargs: self.dispatch(module, args, kwargs, eager=module.forward)  # noqa: E731
            return call_with_hooks(module, inside, args, kwargs)
        return self.dispatch(module, args, kwargs)

    def dispatch(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], eager: Any = None) -> Any:
        """Runs the matching entry, or proceeds as ``on_miss`` says.

        ``eager``: for eager calls; by default forward, with the global hooks, which run for modules inside as well.
        """
        failed = None
        if self.entries.group is not None:
            return self._together(SampleCall(module, args, kwargs), eager or module._call_impl)
        try:
            for entry in self.entries.all:
                inputs = entry.guard.check(module, args, kwargs)
                if inputs is not None:
                    return entry.__call__(inputs, module)  # a method is entered without a call from C
        except GuardFailure as failure:
            failed = failure
        return self._look_closer(SampleCall(module, args, kwargs), eager or module._call_impl, failed)

    def _together(self, call: SampleCall, eager: Any) -> Any:
        """Runs the matching entry if the other processes run the same one, else eager."""
        found, is_agreed = self.entries.match_together(call, self._match)
        if is_agreed and isinstance(found, GuardFailure):
            found = self._learned(call, found) or found
        if isinstance(found, GuardFailure):
            return self._miss(call, found, eager)
        try:
            return found[0](found[1], call.module)
        except GuardFailure as failure:  # the other processes have gone on, and eager must not
            raise RuntimeError(failure.reason) from failure.__cause__

    def _look_closer(self, call: SampleCall, eager: Any, failed: GuardFailure | None) -> Any:
        """The slow path: a call that fails the fast check of every entry.

        ``failed``: the guard failure of entries whose programs ran and had no side effects; the call begins anew.
        """
        compiled = None
        try:
            found = self._match(call, failed)
            if isinstance(found, GuardFailure):
                compiled = self._learned(call, found)
                found = compiled or found
            if not isinstance(found, GuardFailure):
                entry, inputs = found
                return entry(inputs, call.module)
        except GuardFailure as failure:
            found = failure
            found.tried = (*(failed.tried if failed else ()), *found.tried)
        if found.stage == RUN and found is not failed and compiled is None:
            return self._look_closer(call, eager, found)  # another entry may match the branch that the call takes
        return self._miss(call, found, eager)

    def _learned(self, call: SampleCall, found: GuardFailure) -> Match | None:
        """A new entry for a call that missed, with its inputs; or the condition that it fails; ``None``: no entry."""
        if not self._compiles:
            return None
        if not self.entries.all and uninitialized(call.module):
            raise GuardFailure(found.stage, "lazy parameters", "this call gives them their shapes")
        return self._compile(call, found) if self._may_compile(call.name, found) else None

    def _miss(self, call: SampleCall, found: GuardFailure, eager: Any) -> Any:
        if self.options.on_miss == "error":
            raise DispatchMiss(f"{call.name}: {found.reason}") from found.__cause__
        self.entries.count_miss(found.reason)
        guards_log.info("%s runs eager: %s", call.name, found.reason)
        if not self.entries.hits and self.options.on_miss == "eager":
            self._note_no_hit(call.name, found)
        compiles = self.options.on_miss == "compile"
        with self._adding if compiles else nullcontext():  # no other thread captures while forward fills its caches
            result = eager(*call.args, **call.kwargs)
        if found.__cause__ is not None:  # the error of the compiled call, which eager did not raise
            swallowed(found.__cause__)
        return result

    def _note_no_hit(self, name: str, found: GuardFailure) -> None:
        """Warns once if there never was a hit and the latest misses all have the same cause."""
        field, (cause, count) = found.field, self._misses
        count = 1 + count * (field == cause)
        self._misses = field, count
        if count == MISSES_BEFORE_WARNING and self.entries.all and self._first(field):
            words = "%s: no call has been served by TVM yet, the last %d ran eager. What differs: %s. What helps: %s."
            log.warning(words, name, count, found.reason, advice(found, compiles=False))

    def _may_compile(self, name: str, failure: GuardFailure) -> bool:
        """Whether a call that missed may be compiled; warns once for each cause that has used up its budget."""
        if failure.reason in self.entries.refused or failure.__cause__ is not None:  # eager raises the same error
            return False
        is_recorded = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # by the user
        if is_recorded or active_modes():  # state of the code around this call only: the next call may be compiled
            return False
        if self.budget.allows(failure.field, self.entries.all):
            return True
        if self._first((failure.field, "budget")):
            words = (
                "%s runs eager from now on where a call differs from all that were compiled in this: %s. It has been "
            )
            words += "compiled for several of them, and they did not come back. What helps: %s."
            log.warning(words, name, failure.reason, advice(failure, compiles=True))
        return False

    def _match(self, call: SampleCall, failed: GuardFailure | None = None) -> Match:
        """The matching entry and its inputs, or the guard failure of the closest entry.

        ``failed``: the failure of the entries that were tried already.
        """
        closest = failed
        for entry in reversed(self.entries.all):  # among equally close ones, the newest
            if closest is not None and entry in closest.tried:
                continue
            try:
                return entry, entry.guard.match(call)
            except GuardFailure as failure:
                if closest is None or failure.stage > closest.stage:
                    closest = failure
        return closest or no_entry(call)

    @interrupts_deferred()
    def _compile(self, call: SampleCall, failure: GuardFailure) -> Match | None:
        """A new entry for the call, with its inputs, or the condition that it fails; ``None``: unsupported, which is
        remembered and logged."""
        with self._adding:
            found = self._match(call, failure if failure.tried else None)
            if not isinstance(found, GuardFailure):  # another thread was quicker
                return found
            entry = None
            try:
                if not failure.tried:
                    entry = self._frozen_anew(call)
                    if entry is not None:
                        return entry, entry.guard.match(call)
                entry = self._automatic_dynamic(call) or self._added(call)
                inputs = entry.guard.match(call)
                if entry in failure.tried:
                    self._leave_to_eager(call.name, failure, "each run changes the number")
                    return None
            except UnsupportedModule as error:
                if self.options.divide is not None and error.is_of_draws:
                    return self._divided(call, failure, error)
                if self.options.on_miss == "error":
                    raise
                if isinstance(error, CacheNotFilled) and self._first((failure.reason, "filled")):
                    # this eager call fills the cache; a second refusal is final
                    self.budget.note_wasted(failure.field)
                else:
                    self._leave_to_eager(call.name, failure, error)
                return None
            except GuardFailure as still:
                if entry.guard.is_later and self._first((failure.reason, "filled")):
                    return None
                self.entries.drop(entry)  # it was added, but does not serve the call that it was made for
                self._leave_to_eager(call.name, still, "it would never be dispatched")
                return still
            except Exception as error:
                if isinstance(error, CompilationError) and self.on_refused is not None:
                    self._leave_to_eager(call.name, failure, error)
                elif not is_refused_by_eager(error):
                    raise
                return None  # the eager call raises eager's error, with eager's side effects
            if entry.compile_seconds >= LONG_COMPILATION and self._first("seconds"):
                log.warning("%s: a call took %.0f s to compile: %s", call.name, entry.compile_seconds, failure.reason)
            self.learns = False
            self.budget.note_compiled(failure.field, entry)
            self._let_one_leave(call.name, failure)
            return entry, inputs

    def _divided(self, call: SampleCall, failure: GuardFailure, refused: UnsupportedModule) -> Match | None:
        """Dispatches submodules and leaves the call to eager; if none can be dispatched, compiles the whole call."""
        try:
            self.options.divide(call, refused, self.options)
        except UnsupportedModule:
            self.take(replace(self.options, divide=None))
            return self._compile(call, failure)
        except Exception as error:
            if not is_refused_by_eager(error):
                raise
            return None  # eager's own, for other draws than this call's
        self._leave_to_eager(call.name, failure, refused, is_told=True)
        self.entries.divided.add(failure.reason)
        return None

    def _leave_to_eager(self, name: str, failure: GuardFailure, why: object, is_told: bool = False) -> None:
        while len(self.entries.refused) >= MAX_UNSUPPORTED:
            del self.entries.refused[next(iter(self.entries.refused))]
        self.entries.refused[failure.reason] = str(why)
        self.budget.note_wasted(failure.field)
        self.learns = False
        if is_told:
            return
        if self.on_refused is not None:
            self.on_refused(failure.reason, why)
        else:
            log.warning("%s runs eager from now on where %s: %s", name, failure.reason, why)

    def _let_one_leave(self, name: str, failure: GuardFailure) -> None:
        """Drops the least recently used entry if there are too many; warns once per failing guard."""
        entries = self.entries.all
        most = MAX_LOOPED_ENTRIES if entries[-1].has_loops else self.most
        if len(entries) <= most:
            return
        oldest = min(entries[:-1], key=lambda entry: entry.last_used)
        self.entries.drop(oldest)
        self.budget.note_left(oldest)
        if self._first((failure.field, "entries")):
            words = "%s has %d entries, the most there are; the least recently used one leaves for each new one. %s"
            why = f"What keeps differing: {failure.reason}. Pad or bucket the calls, or leave the rare ones to eager"
            log.warning(words, name, most, f"{why} with on_miss='eager'.")

    def add(self, call: SampleCall) -> Entry:
        """Compiles an entry for a call; it replaces entries that serve the call with another strategy or target.

        Returns an existing entry that serves the call with the same options. Raises as :func:`add_tvm_dispatch`.
        """
        require_capturable(call.name)
        if not call.dims:
            backend = self._options(call).backend
            self._automatic_dynamic.of_any_length(call, lambda known: self._is_alike(known, backend, set()))
            return self._added(call)
        try:
            return self._added(call)
        except UnsupportedModule as refused:
            if refused.is_of_numbers:
                with suppress(UnsupportedModule):
                    return self._added(replace(call, dims=(*call.dims, ALL_COUNTS)))
            raise refused from refused.__cause__

    def _added(self, call: SampleCall, looped: LoopedCall | None = None) -> Entry:
        """:meth:`add` without generalizing existing entries; ``looped``: the call with loops of any length."""
        require_capturable(call.name)
        options, dims = self._options(call), set(call.dims)
        backend = options.backend
        if self.options.freeze:
            self._frozen_anew(call)  # also picks up changes without a version count
        fitting = [entry for entry in self.entries.all if entry.guard.holds(call)]
        for served in fitting:
            if self._is_alike(served, backend, dims) and not served.readings:
                log.info("%r serves the call already", served)
                return served
        entry = compile_entry(call, options, looped=looped)
        replaced = [served for served in fitting if same_numbers(served.readings, entry.readings)]
        for served in replaced:
            if self._is_alike(served, backend, dims):
                return served
        is_of_another_length = entry.has_loops and any(known.has_loops for known in self.entries.all)
        if self.measures and not is_of_another_length:
            entry.worth = measure_profitability(entry, call)
        if entry.worth is not None and entry.worth.is_slower and self._first(TOO_SMALL):
            log.warning("%s: %s. %s", call.name, entry.worth, TOO_SMALL)
        for said in filter(self._first, entry.guard.reads.says):
            log.warning("%s.forward %s: a compiled call does not", call.name, said)
        raise_deferred()  # before the module is changed, not after it
        with self._adding:
            self.entries.replace(replaced, entry)
        log.info("added %r", entry)
        return entry

    def _options(self, call: SampleCall) -> EntryOptions:
        wanted = self.options
        backend = backend_of_call(wanted.backend, call)
        return EntryOptions(
            wanted.partition, backend, wanted.freeze, self.graphs, call.dims, steady=wanted.divide is not None
        )

    def _is_alike(self, entry: Entry, backend: Backend, dims: set[DynamicDim]) -> bool:
        """Whether an entry has the current strategy and freezing, this backend, and all these dynamic dimensions."""
        if not dims <= set(entry.options.dims) or (entry.backward is None and entry.is_frozen != self.options.freeze):
            return False
        one, other = entry.options.partition, self.options.partition
        is_same = one is other or (type(one) is type(other) and bool(one == other))
        return is_same and entry.options.backend.key == backend.key

    def _frozen_anew(self, call: SampleCall) -> Entry | None:
        """Refreezes an entry that fails the call only because frozen tensors changed; ``None``: there is none."""
        for known in reversed(self.entries.all):
            if known.guard.frozen is None:
                continue
            try:
                entry = known.renewed(call)
            except GuardFailure:
                continue
            with self._adding:
                self.entries.replace([known], entry)
            log.info("%r is frozen anew", entry)
            return entry
        return None

    def adopt(self, entries: list[Entry]) -> None:
        """Adds entries that were compiled for the same module."""
        with self._adding:
            self.entries.add(*entries)


#: A hook of the deprecated kind gets gradients of the module's last operator, which a compiled call does not have.
_OLD_HOOK = GuardFailure(INTERPRETER, "backward hook of the deprecated kind", "use register_full_backward_hook")
