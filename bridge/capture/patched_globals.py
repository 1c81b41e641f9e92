"""Patched globals: what torch.export replaces for the whole process → replaced for the capturing thread alone."""

from __future__ import annotations

import builtins
import functools
import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.hub import tqdm

from bridge.base.devices import HOST
from bridge.base.fake_type import fake_type_hidden
from bridge.base.replaced import replaced
from bridge.base.torch_export import EXPORT_CONTEXTS, loaded_export_tracer
from bridge.base.torch_internals import (
    FullTraceback,
    SymbolicPatcher,
    compiling_flags,
    fx_proxy,
    mkldnn_switch,
    symbolic_trace,
)
from bridge.base.torch_script import ScriptFunction, run_unfused
from bridge.capture.tracing import HERE, is_capturing, note_question_of_forward, takes_eagers_branches
from bridge.capture.user_frames import UsersTraceback

__all__ = ["here_only", "patched_globals"]


@contextmanager
def patched_globals(*, fakes: bool = True) -> Iterator[None]:
    """While active, what torch.export and torch.fx do to the process while they trace is seen by this thread only.

    ``fakes``: see :func:`bridge.capture.thread_isolation.capturing`.
    """
    with ExitStack() as stack:
        tracer = symbolic_trace.Tracer
        stack.enter_context(replaced(tracer, trace=here_only(_with_own_globals(tracer.trace), tracer.trace)))
        stack.enter_context(replaced(symbolic_trace, _Patcher=_Patcher))
        if FullTraceback is not None:
            stack.enter_context(replaced(fx_proxy, CapturedTraceback=UsersTraceback))
        if hasattr(tqdm, "monitor_interval"):  # torch.fx makes a bar that it does not show; its thread would stay
            stack.enter_context(replaced(tqdm, monitor_interval=0))
        # cuDNN's weights lie behind one another; swapping fakes in does not move them, and fakes lie nowhere
        flatten = nn.RNNBase.flatten_parameters
        stack.enter_context(replaced(nn.RNNBase, flatten_parameters=here_only(lambda module: None, flatten)))
        stack.enter_context(replaced(torch, max_pool1d=here_only(_pooled_rows, torch.max_pool1d)))
        # what TorchScript has fused shows no operators, and reads memory that fakes do not have
        scripted = here_only(partial(_scripted, fakes=fakes), ScriptFunction.__call__)
        stack.enter_context(replaced(ScriptFunction, __call__=scripted))
        for module in map(inspect.getmodule, (torch.svd_lowrank, torch.lobpcg)):  # they ask for the type of a tensor
            asked = here_only(lambda tensors: False, module.has_torch_function)
            stack.enter_context(replaced(module, has_torch_function=asked))
        owner, name = mkldnn_switch
        stack.enter_context(replaced(owner, **{name: here_only(lambda: False, getattr(owner, name))}))
        if takes_eagers_branches():
            stack.enter_context(fake_type_hidden(lambda: is_capturing() and takes_eagers_branches()))
        if (export := loaded_export_tracer()) is not None:
            ours = (_compiling_here, _builtins_here, lambda _: nullcontext())
            theirs = {name: getattr(export, name) for name in EXPORT_CONTEXTS}
            contexts = map(_unless_capturing, theirs.values(), ours)
            stack.enter_context(replaced(export, **dict(zip(theirs, contexts, strict=True))))
        yield


def here_only(here: Callable[..., Any], elsewhere: Callable[..., Any]) -> Callable[..., Any]:
    """``here`` in a thread that captures, ``elsewhere`` in any other."""

    @functools.wraps(here)
    def choose(*args: Any, **kwargs: Any) -> Any:
        return (here if is_capturing() else elsewhere)(*args, **kwargs)

    return choose


def _with_own_globals(function: FunctionType) -> FunctionType:
    """The function with a copy of its globals, where it sets its flags: torch.fx's says that somebody is tracing.

    Of what Dynamo, once it has run, keeps itself out of by a wrapper, it is the function inside.
    """
    function = getattr(function, "_torchdynamo_orig_callable", function)
    own = FunctionType(
        function.__code__, {**function.__globals__}, function.__name__, function.__defaults__, function.__closure__
    )
    return functools.update_wrapper(own, function)


class _Patcher(SymbolicPatcher):
    """torch.fx's, which replaces methods of ``nn.Module`` while it traces; those of this thread, if it captures."""

    def patch_method(self, cls: type, name: str, new_fn: Callable[..., Any], deduplicate: bool = True) -> None:
        if is_capturing():
            new_fn = here_only(new_fn, getattr(cls, name))
        super().patch_method(cls, name, new_fn, deduplicate)


def _unless_capturing(original: Callable[[], Any], ours: Callable[..., Any]) -> Callable[[], Any]:
    """A context manager for whoever asks: another thread may be exporting something on its own."""
    return lambda: ours(original) if is_capturing() else original()


def _pooled_rows(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Eager's result where autograd does not follow it is made by a kernel of the CPU's, contiguous; under a mode, or
    on fake tensors, torch takes the other way, whose result has the argument's order of axes."""
    made = _MAX_POOL1D(x, *args, **kwargs)
    followed = x.requires_grad and torch.is_grad_enabled()
    return made if followed or x.device != HOST else made.contiguous()


_MAX_POOL1D = torch.max_pool1d


def _scripted(function: Any, *args: Any, fakes: bool, **kwargs: Any) -> Any:
    note_question_of_forward()
    return run_unfused(function, *args, fakes=fakes, **kwargs)


@contextmanager
def _compiling_here(original: Callable[[], Any]) -> Iterator[None]:
    with compiling_flags(HERE):
        yield


@contextmanager
def _builtins_here(original: Callable[[], Any]) -> Iterator[None]:
    before = builtins.max, builtins.min, math.pow
    with original():
        builtins.max, builtins.min, math.pow = map(here_only, (builtins.max, builtins.min, math.pow), before)
        yield
