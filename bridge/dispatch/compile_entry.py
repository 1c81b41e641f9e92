"""Compiling an entry: a module's call → an entry (captured, lowered, compiled, guarded); or a refusal.

Tuned choices from the disk cache apply. Their key: the functions compiled by default, the machine, the number of
threads, versions and torch's settings. Choices affect speed and the rounding of sums, never the meaning of a program:
another call's choices would be correct, only not optimal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from bridge.artifact import current_store, from_parts, of_this_package, to_parts, written
from bridge.base.devices import HOST, TYPES, default_device_of_forward, working_for
from bridge.base.errors import Unsupported, UnsupportedModule
from bridge.base.log import Stopwatch, channel
from bridge.base.threads import raise_deferred
from bridge.base.torch_internals import VF, pytree
from bridge.capture import (
    LoopedCall,
    NumberPlace,
    check_call,
    device_of_call,
    looped_run,
    loops_tell,
    one_capture_at_a_time,
)
from bridge.compile import Backend, Choices, CompileOptions, KeptFunction, backend_for, digest_of
from bridge.dispatch.dynamic_scalars import as_called, lower_with_numbers
from bridge.dispatch.entry import Entry, EntryOptions
from bridge.dispatch.guards import EntryGuard, active_modes, uncounted_statistics
from bridge.dispatch.programs import compile_programs, freeze_programs
from bridge.guards import undo
from bridge.lowering import LoweredCall, lower_once
from bridge.rng import begin_check
from bridge.state import SampleCall
from partition import MinCut

__all__ = ["Tuned", "Tuner", "backend_of_call", "before_compiling", "compile_entry", "has_other_choices"]
__all__ += ["installed_tuner", "keep_tuned", "kept_tuned", "recorded_call", "require_capturable", "strategy_of"]
__all__ += ["tuned_of", "tuning_key", "with_choices"]

_KIND = "tuning"

_LOG = channel("tune")


@dataclass(frozen=True)
class Tuned:
    """The stored result of a tuning.

    Attributes:
        choices: the tuned choices.
        date: when the tuning ended, as in ``"2026-05-31"``.
        log: the name of its log, or empty.
        before, after: seconds of a step without and with the choices, timed in turns in one process.
        key: its key in the disk cache.
    """

    choices: Choices
    date: str
    log: str
    before: float
    after: float
    key: str = field(default="", compare=False)

    def __str__(self) -> str:
        where = f", {self.log}" if self.log else ""
        return f"tuned {self.date}{where}: {1e3 * self.before:.3f} ms a step before, {1e3 * self.after:.3f} ms after"


written(Tuned)


def tuning_key(lowered: LoweredCall, backend: Backend, frozen: bool) -> str | None:
    """The cache key of a call's choices, from the call lowered with the user's strategy; ``None``: it cannot be tuned.

    ``frozen``: whether the module's tensors are constants.
    """
    if lowered.captured.sizes.scope is not None:
        return None
    try:
        functions = [_digest(lowered.forward_source)]
        if lowered.differentiable:
            functions.append(_digest(lowered.backward_source(lowered.expected)))
    except ValueError as error:  # a literal cannot be serialized
        _LOG.info("%s cannot be tuned: %s", lowered.captured.module_name, error)
        return None
    return of_this_package(_KIND, backend.machine(), CompileOptions.current(backend).key, functions, frozen)


def kept_tuned(lowered: LoweredCall, backend: Backend, frozen: bool) -> Tuned | None:
    """The stored choices for a call; ``None`` if it was not tuned, or without a gain."""
    store = current_store()
    if not store.has(_KIND):  # without any tuning, no key is computed
        return None
    key = tuning_key(lowered, backend, frozen)
    return None if key is None else tuned_of(key)


def tuned_of(key: str) -> Tuned | None:
    """The stored tuning of a key, or ``None``."""
    found = current_store().get(_KIND, key)
    if found is None:
        return None
    try:
        return replace(from_parts(found.parts), key=key)
    except (ValueError, KeyError, TypeError) as error:
        _LOG.warning("choices on disk are ignored: %r", error)
        return None


def keep_tuned(tuned: Tuned, name: str) -> None:
    """Stores choices in the disk cache; every later entry of their key is compiled with them."""
    current_store().put(_KIND, tuned.key, to_parts(tuned), name)


def has_other_choices(entry: Entry) -> bool:
    """Whether the stored choices for an entry's call differ from the choices it was compiled with."""
    if entry.bound is not None or not isinstance(entry.lowered, LoweredCall) or not current_store().has(_KIND):
        return False
    tuned = entry.options.tuned
    if tuned is not None:
        return tuned_of(tuned.key) != tuned
    return kept_tuned(entry.lowered, entry.options.backend, entry.is_frozen) is not None


def strategy_of(choices: Choices, default: Any) -> Any:
    """The partition's strategy: the tuned choice, or the default."""
    chosen = choices.partition
    return default if chosen is None else chosen if isinstance(chosen, str) else MinCut(budget=chosen)


def with_choices(entry: Entry, choices: Choices) -> Entry:
    """Recompiles an entry's lowered call with choices, except a choice of partition; keeps its guard."""
    backend, frozen = entry.options.backend.choosing(choices), entry.guard.frozen
    if frozen is None:
        programs = compile_programs(entry.lowered, backend, addresses=entry.guard.inputs.addresses)
    else:
        programs = freeze_programs(entry.lowered, backend, frozen.tensors)
    return Entry(entry.guard, entry.lowered, programs, EntryOptions(entry.options.partition, entry.options.backend))


Tuner = Callable[[SampleCall, EntryOptions], None]
"""Called before an entry is compiled; may tune the call."""

_TUNERS: list[Tuner] = []


@contextmanager
def before_compiling(tuner: Tuner) -> Iterator[None]:
    """Context in which ``tuner`` is called before each entry with static shapes is compiled."""
    _TUNERS.append(tuner)
    try:
        yield
    finally:
        _TUNERS.remove(tuner)


def installed_tuner() -> Tuner | None:
    """The innermost active tuner, or ``None``."""
    return _TUNERS[-1] if _TUNERS else None


def _digest(function: Any) -> str:
    return function.digest if isinstance(function, KeptFunction) else digest_of(function)


def backend_of_call(wanted: Backend | None, call: SampleCall) -> Backend:
    """The requested backend, or the backend of the device of a call's tensors.

    Raises:
        UnsupportedModule: the tensors are on several devices, or on another device than the requested backend's.
    """
    device, name = device_of_call(call), call.name
    if device.type not in TYPES:
        reason = f"compiled code runs on {' and '.join(TYPES)}"
        raise UnsupportedModule(name, [Unsupported(f"a tensor on device {device}", f"{name}.forward", reason)])
    if wanted is None:
        try:
            return backend_for(None if device == HOST else str(device))
        except ValueError as error:
            problem = Unsupported(f"tensors on {device}", f"{name}.forward", str(error))
            raise UnsupportedModule(name, [problem]) from error
    if wanted.device != device:
        hint = "leave the target out"
        problem = Unsupported(f"target on {wanted.device}", f"{name}.forward", f"the module is on {device}", hint)
        raise UnsupportedModule(name, [problem])
    return wanted


def compile_entry(
    call: SampleCall,
    options: EntryOptions,
    *,
    numbers: tuple[Entry, Mapping[NumberPlace, Any]] | None = None,
    choices: Choices | None = None,
    looped: LoopedCall | None = None,
) -> Entry | None:
    """Captures, lowers and compiles a call in the current mode; the module is not changed.

    Args:
        numbers: an entry and the scalars in which the call differs from it, with the entry's values: the new entry
            takes these scalars as inputs. Returns ``None`` if that is not exact.
        choices: choices to compile with; ``None``: the tuned choices for the call, or else the defaults.
        looped: the call with loops of any length, given by its dynamic dimensions.

    Raises:
        UnsupportedModule, CompilationError: as :func:`bridge.lower`.
    """
    module, backend = call.module, options.backend
    owned = [*module.parameters()]
    backend.prepare(owned)  # first: entering imports Dynamo, which takes as long as a build
    with _compiling(call) as (call, gradients), loops_tell(partial(backend.prepare, owned, in_loops=True)):
        options = replace(options, freeze=options.freeze and not gradients)
        return _compile_entry(call, options, numbers, choices, looped)


def recorded_call(call: SampleCall) -> LoopedCall | None:
    """A recording of a call and its loops in the current mode; ``None``: unsupported. The module is not changed."""
    with _compiling(call) as (call, _):
        try:
            check_call(call)
            with working_for(device_of_call(call)):
                return looped_run(call)
        except UnsupportedModule:
            return None


@contextmanager
def _compiling(call: SampleCall) -> Iterator[tuple[SampleCall, bool]]:
    """Context with the modes for compiling a call; yields the call, and whether gradients are wanted."""
    gradients = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    # compiled code treats inference mode as no_grad
    modes = torch.inference_mode(False), torch.set_grad_enabled(gradients), default_device_of_forward()
    with ExitStack() as stack:
        for mode in (*modes, one_capture_at_a_time()):
            stack.enter_context(mode)
        call = call.as_pytree()
        if not gradients:
            args, kwargs = pytree.tree_map_only(torch.Tensor, _outside_inference, (call.args, call.kwargs))
            call = replace(call, args=args, kwargs=kwargs)
        yield call, gradients


def _outside_inference(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor; an inference tensor is copied to an ordinary one with the same layout."""
    if not tensor.is_inference():
        return tensor
    storage = tensor.untyped_storage().clone()
    return VF.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
        storage, tensor.storage_offset(), tensor.shape, tensor.stride()
    )


def _compile_entry(
    call: SampleCall,
    options: EntryOptions,
    numbers: tuple[Entry, Mapping[NumberPlace, Any]] | None,
    choices: Choices | None,
    looped: LoopedCall | None,
) -> Entry | None:
    """Captures, lowers and compiles a call → its entry; undoes the capture's changes of the module's Python state."""
    watch = Stopwatch()
    module, backend, tuned = call.module, options.backend, None
    dropouts = (each for each in module.modules() if isinstance(each, nn.Dropout) and each.training)
    if backend.device.type == "cuda" and any(each.p > 0 for each in dropouts):
        begin_check(backend.device)
    with undo(module) as before:
        try:
            if numbers is None:
                places, lowered = (), lower_once(call, options.partition, looped, options.steady)
                if choices is None and not call.dims:
                    tuned = kept_tuned(lowered, backend, options.freeze)
                    choices = None if tuned is None else tuned.choices
                if choices is not None and choices.partition is not None:
                    lowered = lower_once(replace(call, dims=()), strategy_of(choices, options.partition))
                captured = lowered.captured
            else:
                known, changed = numbers
                found = lower_with_numbers(call, options.partition, changed, known.lowered, known.guard.numbers)
                if found is None or found[0].captured.numbers.guards:  # forward may branch on the value of a scalar
                    before.restore()
                    return None
                lowered, places = found
                captured = as_called(lowered.captured, call, len(places))
            constant = uncounted_statistics(module, captured) if options.freeze else None
            reads = numbers[0].guard.reads if numbers else before.runs[-1] if before.runs else None
            guard = EntryGuard(module, captured, call.tensors, places, constant, reads=reads)
            frozen, made_for = guard.frozen, backend if choices is None else backend.choosing(choices)
            if frozen is None:
                programs = compile_programs(lowered, made_for, options.graphs, guard.inputs.addresses)
            else:
                programs = freeze_programs(lowered, made_for, frozen.tensors, options.graphs)
            entry = Entry(guard, lowered, programs, replace(options, tuned=tuned))
            raise_deferred()
            guard.settling, guard.is_later = before.take_back(), before.is_later
            for each in before.runs:
                each.forget()
            if looped is None:
                captured.observation.reads = None
            entry.compile_seconds = watch.seconds  # less than ``lowered`` took, where it was reused
            return entry
        except BaseException:
            before.restore()
            raise


def require_capturable(module_name: str) -> None:
    """Raises :class:`UnsupportedModule` for an active mode (vmap, a dispatch mode, ...) around the capture."""
    for name in active_modes():
        problem = Unsupported(name, "where add_tvm_dispatch is called", "is active", "add the dispatch outside it")
        raise UnsupportedModule(module_name, [problem])
