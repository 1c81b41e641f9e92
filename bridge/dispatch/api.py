"""``add_tvm_dispatch``, ``remove_tvm_dispatch`` and ``stats``: the public functions on a dispatched module."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch
import tvm
from torch import nn

from bridge.base.errors import UnsupportedModule, note_sample, without_parts
from bridge.base.threads import interrupts_deferred
from bridge.base.torch_internals import COMPILED_CALL
from bridge.capture import after_pre_hooks, dynamic_dims, normalize_sample
from bridge.compile import MODES, backend_for
from bridge.dispatch.dispatcher import Dispatcher, DispatchOptions
from bridge.dispatch.entries import DispatchStats
from bridge.dispatch.options import dispatcher_of, install, options_of, uninstall
from bridge.dispatch.parts import PartStats, add_parts, parts_of, remove_parts
from bridge.lowering import DEFAULT_PARTITION
from bridge.state import SampleCall
from partition import Strategy
from partition.cut import resolve as resolve_strategy

__all__ = ["add_tvm_dispatch", "remove_tvm_dispatch", "stats"]

Module = TypeVar("Module", bound=nn.Module)

ON_MISS = ("eager", "compile", "error")
_NAMED = 8
"""Most modules that a message names."""


@interrupts_deferred()
def add_tvm_dispatch(
    module: Module,
    sample_input: Any = None,
    *others: Any,
    sample_kwargs: Mapping[str, Any] | None = None,
    partition: str | Strategy = DEFAULT_PARTITION,
    on_miss: Literal["eager", "compile", "error"] | None = None,
    target: tvm.target.Target | str | dict[str, Any] | None = None,
    dynamic_shapes: Any = None,
    freeze: bool = False,
    cuda_graphs: Literal["auto"] | bool = "auto",
    whole: bool | None = None,
) -> Module:
    """Implements :func:`bridge.add_tvm_dispatch`."""
    learns, is_default = sample_input is None and sample_kwargs is None, on_miss is None
    on_miss = ("compile" if learns else "eager") if on_miss is None else on_miss
    _require_arguments(module, others, on_miss, cuda_graphs, freeze=freeze, whole=whole)
    resolve_strategy(partition)
    call = SampleCall(module) if learns else SampleCall(module, *normalize_sample(module, sample_input, sample_kwargs))
    if whole is False and (learns or dynamic_shapes is not None):
        raise TypeError("whole=False: wanted a sample_input and no dynamic_shapes (on_miss='compile' finds them)")
    if learns and dynamic_shapes is not None:
        raise TypeError("dynamic_shapes: wanted a sample_input that they are shapes of")
    if module.__dict__.get(COMPILED_CALL) is not None and dispatcher_of(module) is None:
        raise ValueError(f"{type(module).__name__} was compiled with module.compile(); dispatch a module that was not")
    backend = None if target is None else backend_for(target)
    is_whole = whole or dynamic_shapes is not None or (learns and on_miss == "error")
    divide = None if is_whole else partial(add_parts, compiles_selected=is_default)
    options = DispatchOptions(partition, on_miss, backend, freeze, cuda_graphs, divide)
    dispatcher = dispatcher_of(module) or Dispatcher(module, options)
    if learns:
        dispatcher.take(options)
        dispatcher.learns = True
        install(module, dispatcher)
        return module
    with after_pre_hooks(call) as given:
        call = replace(given, dims=dynamic_dims(given, dynamic_shapes))
        try:
            if not _add(dispatcher, call, options, is_whole=whole is not False):
                return module
        except UnsupportedModule as refused:
            if whole is False or not any(module.children()):
                raise without_parts(refused) from refused.__cause__
            raise
        except Exception as error:
            _add_note(error, is_one_mapping=isinstance(sample_input, Mapping) and bool(call.args))
            raise
    install(module, dispatcher)
    return module


def _add(dispatcher: Dispatcher, call: SampleCall, options: DispatchOptions, is_whole: bool) -> bool:
    """Adds an entry for a call to a dispatcher; returns False if it dispatched submodules instead.

    Args:
        is_whole: whether random draws that select the code to run are the only reason to divide the module.
    """
    problem = None
    with torch.no_grad() if options.freeze else nullcontext():
        try:
            with options_of(dispatcher, options):
                dispatcher.add(call)
                return True
        except UnsupportedModule as refused:
            if options.divide is None or (is_whole and not refused.is_of_draws):
                raise
            problem = refused
        try:  # outside of the except clause: its errors are not caused by the refusal
            options.divide(call, problem, options)
            return False
        except UnsupportedModule:
            if not problem.is_of_draws:
                raise
    return _add(dispatcher, call, replace(options, divide=None), is_whole)


def _require_module(module: Any) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"module: wanted a torch.nn.Module, got {type(module).__name__}")


def _require_arguments(module: Any, others: tuple, on_miss: Any, cuda_graphs: Any, **flags: Any) -> None:
    """Raises for an argument of :func:`add_tvm_dispatch` of a wrong type, or out of range."""
    _require_module(module)
    if others:
        raise TypeError(f"sample_input: {1 + len(others)} arguments want a tuple, add_tvm_dispatch(module, (x, y))")
    if on_miss not in ON_MISS:
        raise ValueError(f"on_miss: wanted one of {', '.join(map(repr, ON_MISS))}, got {on_miss!r}")
    if type(cuda_graphs) not in (str, bool) or cuda_graphs not in MODES:
        raise ValueError(f"cuda_graphs: wanted one of {', '.join(map(repr, MODES))}, got {cuda_graphs!r}")
    for name, flag in flags.items():
        if not isinstance(flag, bool) and (name, flag) != ("whole", None):
            raise TypeError(f"{name}: wanted True or False, got {flag!r}")


def _add_note(error: Exception, is_one_mapping: bool) -> None:
    """Adds a note to an error that the sample may have caused."""
    if not is_one_mapping:
        note_sample(error)
    elif hasattr(error, "add_note"):  # not in Python 3.10
        error.add_note("the keys of sample_input name no parameters of forward: it was taken for its one argument")


def remove_tvm_dispatch(module: Module) -> Module:
    """Implements :func:`bridge.remove_tvm_dispatch`."""
    _require_module(module)
    remove_parts(module)
    uninstall(module)
    return module


def stats(module: nn.Module) -> DispatchStats:
    """Implements :func:`bridge.stats`."""
    _require_module(module)
    dispatcher, parts = dispatcher_of(module), parts_of(module)
    if parts is not None:
        return PartStats(module, parts)
    if dispatcher is None:
        raise ValueError(f"{type(module).__name__} is not dispatched: {_what_is(module)}")
    return dispatcher.stats


def _what_is(module: nn.Module) -> str:
    if hasattr(module, "_orig_mod"):
        return "torch.compile made it; bridge.dynamo.graphs() has what became of its graphs"
    inside = [path for path, child in module.named_modules() if dispatcher_of(child) is not None]
    if not inside:
        return "call add_tvm_dispatch(module, sample) first (copies and pickles of a dispatched module are plain ones)"
    more = f" and {len(inside) - _NAMED} more" if len(inside) > _NAMED else ""
    return f"ask for the modules inside it that are: {', '.join(inside[:_NAMED])}{more}; as in " + (
        f"stats(module.get_submodule({inside[0]!r}))"
    )
