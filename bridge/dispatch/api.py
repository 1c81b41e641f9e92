"""``add_tvm_dispatch``, ``remove_tvm_dispatch`` and ``stats``: the public functions on a dispatched module.

The dispatcher lies where ``nn.Module.compile()`` puts its own callable: in the instance attribute
``_compiled_call_impl``, which ``nn.Module.__call__`` asks first and ``nn.Module.__getstate__`` drops, so that copies
and pickles are plain modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal, TypeVar

import torch
import tvm
from torch import nn

from bridge.base.errors import UnsupportedModule, is_refused_by_eager
from bridge.base.threads import interrupts_deferred
from bridge.base.torch_internals import COMPILED_CALL
from bridge.capture import after_pre_hooks, dynamic_dims, normalize_sample
from bridge.compile import MODES, backend_for
from bridge.dispatch.dispatcher import Dispatcher, DispatchOptions
from bridge.dispatch.options import dispatcher_of, install, options_of, uninstall
from bridge.dispatch.parts import PartStats, add_parts, parts_of, remove_parts
from bridge.dispatch.stats import DispatchStats
from bridge.lowering import DEFAULT_PARTITION
from bridge.state import SampleCall
from partition import Strategy
from partition.cut import resolve as resolve_strategy

__all__ = ["add_tvm_dispatch", "remove_tvm_dispatch", "stats"]

Module = TypeVar("Module", bound=nn.Module)

ON_MISS = ("eager", "compile", "error")
_NAMED = 8
"""Modules that a message names."""


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
    whole: bool = True,
) -> Module:
    """Compiles a call of ``module``, forward and backward, and dispatches matching calls to it from now on.

    Without a sample, the first call is the sample: it is compiled when it is made.

    A call matches if everything that was compiled still holds: values, shapes, dtypes and strides of forward's
    parameters (given by position, by name or by default: that makes no difference), training flags, grad mode,
    autocast, which tensors require grad, the module tree, its plain attributes and what its code reads. It is compiled
    under the grad mode and the autocast state around this call. Any other call runs as PyTorch would and is counted
    with a reason in :func:`stats`. Called again with another sample or in another mode, it adds an entry; with a call
    that an entry serves already, it changes ``on_miss``, and compiles anew only for another ``partition`` or
    ``target``. An entry added under ``torch.no_grad()`` also serves ``torch.inference_mode()``; where nothing requires
    a gradient, one entry serves with and without gradients.

    Inside a model that ``torch.compile`` compiles, a dispatched module runs its own code, with a graph break on either
    side (an error under ``fullgraph=True``). Code that was compiled before does not know that: dispatch the module
    first, or call ``torch.compiler.reset()``.

    Threads may call dispatched modules, also one and the same, and add entries, by this function or by calls that miss
    under ``on_miss="compile"``, beside anything that others do (:mod:`bridge.capture.thread_isolation`). One entry is
    added at a time, and none while Dynamo compiles. Other threads' calls of the very module that is captured wait for
    the end of the capture (a second or so). Not safe beside it: traces that others start themselves
    (``torch.export``, ``torch.fx``, ``torch.jit``), and changes of the module's hooks, submodules, attributes, and
    globals that it reads.

    Args:
        module: any module; it is changed in place only by one attribute that copies and pickles drop.
        sample_input: a tensor (one positional argument), a tuple or a list (positional arguments: a DataLoader's
            batch) or a mapping (keyword arguments: a dict, transformers' ``BatchEncoding``) of dense tensors,
            numbers, strings, flags and ``None``; of tensors only shape, strides, dtype and requires_grad count, and the
            numbers where forward reads them (``if x.any()``): the entry serves calls that read the same. A
            list or a mapping that fits forward's signature as its one argument only is that argument; to say so:
            ``(batch,)``.
        sample_kwargs: further keyword arguments.
        partition: what is saved for the backward: ``"min_cut"``, ``"save_all"``, ``"recompute_all"`` or a strategy.
        on_miss: for calls that match no entry: ``"eager"`` (the default where there is a sample), ``"compile"`` (the
            default without one; the second size of a dimension is compiled for all sizes from 2 on, if that is exact;
            at most ``MAX_ENTRIES`` entries are kept, and what differs in the same thing at every call is compiled for a
            few times only, then runs eager) or ``"error"``.
        target: a TVM target of kind ``llvm`` or ``cuda``, or a GPU by name (``"cuda:1"``); by default the device of the
            module's and the sample's tensors.
        dynamic_shapes: which dimensions of the sample vary, as torch.export takes it: the entry serves all sizes from 2
            on, or those of the ``Dim``'s range. What forward asks about sizes is a condition of the entry.
        freeze: for inference: the module's parameters and buffers become constants of calls without gradients
            (``torch.no_grad()``, ``torch.inference_mode()``), for which the sample is compiled. What depends on them
            alone is computed once, BatchNorm folded into the convolution before it, products of one input merged;
            results are eager's to rounding. A call after a tensor was changed or replaced is a miss, which
            ``on_miss="compile"`` answers by computing the constants again. Changes that torch does not count (through
            ``.data`` or NumPy) are not seen: call this again after them.
        cuda_graphs: whether forward and backward on a GPU are recorded as one CUDA graph each, after a few calls:
            ``"auto"``, the default: where launching the kernels one by one takes the host about as long as the GPU, or
            longer, which the first calls are timed for, and where there is memory to spare; ``True``: wherever that is
            exact; ``False``: never. Results and gradients are tensors like any others, and ``stats(module).graphs``
            counts the calls without a graph by their reasons.
        whole: whether a module that cannot be captured whole is refused. ``False``: the largest modules inside it that
            can be are dispatched then, each with what it is called with in a run of the sample; the code between them
            runs as before. ``stats(module)`` and ``explain(module)`` say what stays eager and why, and which share of
            an eager forward's time is spent in what is dispatched. Wants a sample, and no ``dynamic_shapes``.

    Returns:
        ``module``.

    Raises:
        TypeError: ``module`` is no module, ``freeze`` or ``whole`` no flag, or the sample does not fit the module, or
            fits it in two ways.
        ValueError: an unknown ``partition``, ``on_miss``, ``target`` or ``cuda_graphs``, or a module that
            ``module.compile()`` compiled.
        UnsupportedModule: the module holds something that cannot be done exactly; it is left as it was.
        CompilationError: a bug in this package; the module is left as it was.
        KeyboardInterrupt: Ctrl-C, at the next stage of compiling; the module is left as it was.

    Example:
        >>> module = nn.Linear(3, 2)
        >>> x = torch.ones(5, 3)
        >>> module = add_tvm_dispatch(module, x)
        >>> module(x).sum().backward()
        >>> stats(module).hits
        1
    """
    learns = sample_input is None and sample_kwargs is None
    on_miss = ("compile" if learns else "eager") if on_miss is None else on_miss
    _require_arguments(module, others, on_miss, cuda_graphs, freeze=freeze, whole=whole)
    resolve_strategy(partition)
    call = SampleCall(module) if learns else SampleCall(module, *normalize_sample(module, sample_input, sample_kwargs))
    if not whole and (learns or dynamic_shapes is not None):
        raise TypeError("whole=False: wanted a sample_input and no dynamic_shapes (on_miss='compile' finds them)")
    if learns and dynamic_shapes is not None:
        raise TypeError("dynamic_shapes: wanted a sample_input that they are shapes of")
    if module.__dict__.get(COMPILED_CALL) is not None and dispatcher_of(module) is None:
        raise ValueError(f"{type(module).__name__} was compiled with module.compile(); dispatch a module that was not")
    backend = None if target is None else backend_for(target)
    options = DispatchOptions(partition, on_miss, backend, freeze, cuda_graphs)
    dispatcher = dispatcher_of(module) or Dispatcher(module, options)
    if learns:
        dispatcher.take(options)
        dispatcher.learns = True
        install(module, dispatcher)
        return module
    with after_pre_hooks(call) as given:
        call = replace(given, dims=dynamic_dims(given, dynamic_shapes))
        try:
            with options_of(dispatcher, options), torch.no_grad() if freeze else nullcontext():
                dispatcher.add(call)
        except UnsupportedModule as refused:
            if whole:
                raise
            problem = refused
        except Exception as error:
            _add_note(error, is_one_mapping=isinstance(sample_input, Mapping) and bool(call.args))
            raise
        else:
            problem = None
        if problem is not None:  # outside of the except clause: what goes wrong then has nothing to do with it
            with torch.no_grad() if freeze else nullcontext():
                add_parts(call, problem, options)
            return module
    install(module, dispatcher)
    return module


def _require_arguments(module: Any, others: tuple, on_miss: Any, cuda_graphs: Any, **flags: Any) -> None:
    """Raises for arguments of :func:`add_tvm_dispatch` of another type, or out of their range."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"module: wanted a torch.nn.Module, got {type(module).__name__}")
    if others:
        raise TypeError(f"sample_input: {1 + len(others)} arguments want a tuple, add_tvm_dispatch(module, (x, y))")
    if on_miss not in ON_MISS:
        raise ValueError(f"on_miss: wanted one of {', '.join(map(repr, ON_MISS))}, got {on_miss!r}")
    if type(cuda_graphs) not in (str, bool) or cuda_graphs not in MODES:
        raise ValueError(f"cuda_graphs: wanted one of {', '.join(map(repr, MODES))}, got {cuda_graphs!r}")
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{name}: wanted True or False, got {flag!r}")


def _add_note(error: Exception, is_one_mapping: bool) -> None:
    """Says what a sample may have to do with an error."""
    if not hasattr(error, "add_note"):  # Python 3.10
        return
    if is_one_mapping:
        error.add_note("the keys of sample_input name no parameters of forward: it was taken for its one argument")
    elif is_refused_by_eager(error):
        error.add_note("PyTorch raises this for the sample that was given, with or without a dispatch")


def dispatch_at_first_call(
    module: nn.Module,
    on_refused: Callable[[str, object], None],
    *,
    on_miss: Literal["eager", "compile", "error"],
    partition: str | Strategy = DEFAULT_PARTITION,
) -> None:
    """As ``add_tvm_dispatch(module)`` without a sample; what is refused is told, and neither raised nor logged.

    Args:
        on_refused: called with what is special about a call and with the reason why it runs eager.

    Raises:
        ValueError: as :func:`add_tvm_dispatch`.
    """
    add_tvm_dispatch(module, on_miss=on_miss, partition=partition)
    dispatcher_of(module).on_refused = on_refused


def remove_tvm_dispatch(module: Module) -> Module:
    """Takes the dispatch off ``module`` and frees what was compiled; a module without one is returned as it is.

    Graphs of earlier calls hold what they need and can still run backward.

    Returns:
        ``module``.

    Raises:
        TypeError: ``module`` is no module.

    Example:
        >>> add_tvm_dispatch(module, x)
        >>> remove_tvm_dispatch(module)(x)  # PyTorch's own again
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module: wanted a torch.nn.Module, got {type(module).__name__}")
    remove_parts(module)
    uninstall(module)
    return module


def stats(module: nn.Module) -> DispatchStats:
    """Hits, misses with their reasons, and entries of a dispatched module: a live object, counted up by every call.

    Raises:
        TypeError: ``module`` is no module.
        ValueError: ``module`` is not dispatched; the message names the modules inside it that are.

    Example:
        >>> add_tvm_dispatch(module, torch.ones(5, 3))
        >>> module(torch.ones(4, 3))
        >>> dict(stats(module).misses)
        {'shape of args[0]: compiled for (5, 3), called with (4, 3)': 1}
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module: wanted a torch.nn.Module, got {type(module).__name__}")
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
