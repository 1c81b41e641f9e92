"""Compiling an entry: a module and a call of it → captured, lowered, compiled, with its guard; or a refusal."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from bridge.base.devices import HOST, TYPES, default_device_of_forward, working_for
from bridge.base.errors import Unsupported, UnsupportedModule
from bridge.base.threads import raise_deferred
from bridge.base.torch_internals import pytree
from bridge.capture import (
    DynamicDim,
    LoopedCall,
    NumberPlace,
    check_call,
    device_of_call,
    looped_run,
    loops_tell,
    one_capture_at_a_time,
)
from bridge.compile import Backend, Choices, RecordedGraphs, backend_for
from bridge.dispatch.entry import Entry
from bridge.dispatch.frozen import FrozenPrograms
from bridge.dispatch.guards import EntryGuard, active_modes, uncounted_statistics
from bridge.dispatch.number_inputs import as_called, lower_with_numbers
from bridge.dispatch.tuned import kept_tuned, strategy_of
from bridge.guards import undo
from bridge.lowering import lower_once
from bridge.rng import begin_check

__all__ = ["backend_of_call", "compile_entry", "recorded_call", "require_capturable"]


def backend_of_call(wanted: Backend | None, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Backend:
    """The backend that is wanted, or that of the device that a call's tensors are on.

    Raises:
        UnsupportedModule: they are on several devices, or on another one than that of the backend that is wanted.
    """
    device = device_of_call(module, args, kwargs)
    name = type(module).__name__
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
    module: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    *,
    partition: Any,
    backend: Backend,
    numbers: tuple[Entry, Mapping[NumberPlace, Any]] | None = None,
    dims: Sequence[DynamicDim] = (),
    freeze: bool = False,
    graphs: RecordedGraphs | None = None,
    choices: Choices | None = None,
    looped: LoopedCall | None = None,
) -> Entry | None:
    """Captures, lowers and compiles ``module(*args, **kwargs)`` in the current mode; the module is not changed.

    Args:
        numbers: an entry that the call differs from by these numbers, with the values that it was compiled for: the
            new entry takes them as inputs. ``None`` is returned if that is not exact.
        dims: dimensions of arguments whose sizes vary.
        freeze: whether the module's tensors become constants, if no gradients are wanted.
        graphs: control of the programs' recorded graphs; ``None``: there are none.
        choices: to compile it with; ``None``: those that were tuned for the call, default ones where none were.
        looped: the call with loops of any length, which ``dims`` tell.

    Raises:
        UnsupportedModule, CompilationError: as :func:`bridge.lower`.
    """
    backend.prepare([*module.parameters()])  # first: entering imports Dynamo, which takes as long as a build
    with _compiling(args, kwargs) as (args, kwargs, gradients), loops_tell(partial(_prepare_loops, module, backend)):
        frozen = freeze and not gradients
        entry = _compile_entry(module, args, kwargs, partition, backend, numbers, dims, frozen, graphs, choices, looped)
    if entry is None:
        return None
    entry.partition, entry.backend, entry.dims = partition, backend, frozenset(dims)
    return entry


def recorded_call(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> LoopedCall | None:
    """A call with its loops, recorded in the current mode; ``None`` where that cannot be. The module is not changed."""
    with _compiling(args, kwargs) as (args, kwargs, _):
        try:
            check_call(module, args, kwargs)
            with working_for(device_of_call(module, args, kwargs)):
                return looped_run(module, args, kwargs)
        except UnsupportedModule:
            return None


@contextmanager
def _compiling(args: tuple, kwargs: dict[str, Any]) -> Iterator[tuple[tuple, dict[str, Any], bool]]:
    """The modes in which a call is compiled; gives the call's arguments, and whether gradients are wanted."""
    gradients = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    # to the code that is compiled, inference mode is the same as no_grad
    modes = torch.inference_mode(False), torch.set_grad_enabled(gradients), default_device_of_forward()
    with ExitStack() as stack:
        for mode in (*modes, one_capture_at_a_time()):
            stack.enter_context(mode)
        if not gradients:
            args, kwargs = pytree.tree_map_only(torch.Tensor, _outside_inference, (args, kwargs))
        yield args, kwargs, gradients


def _outside_inference(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or one of the same layout and numbers that was not made in inference mode."""
    if not tensor.is_inference():
        return tensor
    storage = tensor.untyped_storage().clone()
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
        storage, tensor.storage_offset(), tensor.shape, tensor.stride()
    )


def _compile_entry(
    module: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    partition: Any,
    backend: Backend,
    numbers: tuple[Entry, Mapping[NumberPlace, Any]] | None,
    dims: Sequence[DynamicDim],
    freeze: bool,
    graphs: RecordedGraphs | None,
    choices: Choices | None,
    looped: LoopedCall | None,
) -> Entry | None:
    started = time.perf_counter()
    how, tuned = {"grad": torch.is_grad_enabled(), "partition": partition}, None
    if backend.device.type == "cuda" and any(map(_drops, module.modules())):
        begin_check(backend.device)
    with undo(module) as before:
        try:
            if numbers is None:
                places, lowered = (), lower_once(module, args, kwargs, **how, dims=dims, looped=looped)
                if choices is None and not dims:
                    tuned = kept_tuned(lowered, backend, freeze)
                    choices = None if tuned is None else tuned.choices
                if choices is not None and choices.partition is not None:
                    lowered = lower_once(module, args, kwargs, **{**how, "partition": strategy_of(choices, partition)})
                captured = lowered.captured
            else:
                known, changed = numbers
                found = lower_with_numbers(
                    module, args, kwargs, changed, known.lowered, known.guard.numbers, **how, dims=dims
                )
                if found is None or found[0].captured.readings:  # a number that Python reads decides by its value
                    before.restore()
                    return None
                lowered, places = found
                captured = as_called(lowered.captured, args, kwargs, len(places))
            arguments = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            constant = uncounted_statistics(module, captured) if freeze else None
            reads = numbers[0].guard.reads if numbers else before.runs[-1] if before.runs else None
            guard = EntryGuard(module, captured, arguments, places, constant, reads=reads)
            frozen, made_for = guard.frozen, backend if choices is None else backend.choosing(choices)
            programs = None if frozen is None else FrozenPrograms(lowered, made_for, frozen.tensors, graphs)
            entry = Entry(guard, lowered, made_for, programs, graphs)
            entry.tuned = tuned
            raise_deferred()
            guard.settling, guard.is_later = before.take_back(), before.is_later
            for each in before.runs:
                each.forget()
            if looped is None:
                captured.observation.reads = None
            entry.compile_seconds = time.perf_counter() - started  # less than ``lowered`` took, where it was reused
            return entry
        except BaseException:
            before.restore()
            raise


def _prepare_loops(module: nn.Module, backend: Backend) -> None:
    backend.prepare([*module.parameters()], in_loops=True)


def _drops(module: nn.Module) -> bool:
    return isinstance(module, nn.Dropout) and module.training and module.p > 0


def require_capturable(module_name: str) -> None:
    """Capturing needs plain PyTorch around it: :class:`UnsupportedModule` names what else is active."""
    for name in active_modes():
        problem = Unsupported(name, "where add_tvm_dispatch is called", "is active", "add the dispatch outside it")
        raise UnsupportedModule(module_name, [problem])
