"""Compiling an entry: a module's call → an entry (captured, lowered, compiled, guarded); or a refusal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from bridge.base.devices import HOST, TYPES, default_device_of_forward, working_for
from bridge.base.errors import Unsupported, UnsupportedModule
from bridge.base.log import Stopwatch
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
from bridge.compile import Backend, backend_for
from bridge.dispatch.dynamic_scalars import as_called, lower_with_numbers
from bridge.dispatch.entry import Entry, EntryOptions
from bridge.dispatch.guards import EntryGuard, active_modes, uncounted_statistics
from bridge.dispatch.programs import compile_programs, freeze_programs
from bridge.guards import undo
from bridge.lowering import lower_once
from bridge.rng import begin_check
from bridge.state import SampleCall

__all__ = ["backend_of_call", "compile_entry", "recorded_call", "require_capturable"]


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
    looped: LoopedCall | None = None,
) -> Entry | None:
    """Captures, lowers and compiles a call in the current mode; the module is not changed.

    Args:
        numbers: an entry and the scalars in which the call differs from it, with the entry's values: the new entry
            takes these scalars as inputs. Returns ``None`` if that is not exact.
        looped: the call with loops of any length, given by its dynamic dimensions.

    Raises:
        UnsupportedModule, CompilationError: as :func:`bridge.lower`.
    """
    module, backend = call.module, options.backend
    owned = [*module.parameters()]
    backend.prepare(owned)  # first: entering imports Dynamo, which takes as long as a build
    with _compiling(call) as (call, gradients), loops_tell(partial(backend.prepare, owned, in_loops=True)):
        options = replace(options, freeze=options.freeze and not gradients)
        return _compile_entry(call, options, numbers, looped)


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
    looped: LoopedCall | None,
) -> Entry | None:
    """Captures, lowers and compiles a call → its entry; undoes the capture's changes of the module's Python state."""
    watch = Stopwatch()
    module, backend = call.module, options.backend
    dropouts = (each for each in module.modules() if isinstance(each, nn.Dropout) and each.training)
    if backend.device.type == "cuda" and any(each.p > 0 for each in dropouts):
        begin_check(backend.device)
    with undo(module) as before:
        if numbers is None:
            places, lowered = (), lower_once(call, options.partition, looped, options.steady)
            captured = lowered.captured
        else:
            known, changed = numbers
            found = lower_with_numbers(call, options.partition, changed, known.lowered, known.guard.numbers)
            if found is None or found[0].captured.numbers.guards:  # forward may branch on the value of a scalar
                before.restore()
                return None
            lowered, places = found
            captured = as_called(lowered.captured, call, len(places))
        is_whole = all(spec.sharding is None for spec in captured.module_tensors)  # else local tensors are new ones
        constant = uncounted_statistics(module, captured) if options.freeze and is_whole else None
        reads = numbers[0].guard.reads if numbers else before.runs[-1] if before.runs else None
        guard = EntryGuard(module, captured, call.tensors, places, constant, reads=reads)
        if guard.frozen is None:
            programs = compile_programs(lowered, backend, options.graphs, guard.inputs.addresses)
        else:
            programs = freeze_programs(lowered, backend, guard.frozen.tensors, options.graphs)
        entry = Entry(guard, lowered, programs, options)
        raise_deferred()
        guard.settling, guard.is_later = before.take_back(), before.is_later
        for each in before.runs:
            each.forget()
        if looped is None:
            captured.observation.reads = None
        entry.compile_seconds = watch.seconds  # less than ``lowered`` took, where it was reused
        return entry


def require_capturable(module_name: str) -> None:
    """Raises :class:`UnsupportedModule` for an active mode (vmap, a dispatch mode, ...) around the capture."""
    for name in active_modes():
        problem = Unsupported(name, "where add_tvm_dispatch is called", "is active", "add the dispatch outside it")
        raise UnsupportedModule(module_name, [problem])
