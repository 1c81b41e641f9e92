"""Capture: a module and a sample call → a functional ATen graph with everything that training needs beside it.

``torch.export`` traces the module in its current mode. Its training IR still has ``detach`` and ``no_grad`` regions;
the functional IR has lost them, so they are first rewritten into an operator of ours, ``tvm_dispatch::stop_gradient``.
A fake run observes what eager does and the graph no longer says, an eager run what fake tensors get wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from bridge.base.collector import collection_paused
from bridge.base.devices import current_device, working_for
from bridge.base.errors import Unsupported, UnsupportedModule, is_refused_by_eager
from bridge.base.interrupts import raise_deferred
from bridge.base.log import channel
from bridge.base.modes import ambient_autocast, autocast_to
from bridge.base.torch_cuda import settle_attention_order
from bridge.base.torch_export import export_tracer
from bridge.base.torch_internals import FakeTensor, pytree
from bridge.capture.captured import Captured
from bridge.capture.counters import counters_of
from bridge.capture.dynamic_shapes import DynamicDim, refuse_numbers
from bridge.capture.eager_error import raise_if_eager_raises
from bridge.capture.eager_run import as_in_eager, goes_another_way, real_run
from bridge.capture.explain_error import explain_error, is_unknown, shape_by_numbers
from bridge.capture.exported import (
    NotExportedError,
    argument_values,
    constants,
    export,
    placeholders,
    requiring_grad,
    results_and_mutations,
)
from bridge.capture.fake_run import fake_run, forget_real_tensors
from bridge.capture.free_tensors import free_tensors
from bridge.capture.loops.attempt import Looped, looped_call
from bridge.capture.module_calls import forward_here
from bridge.capture.number_index import computes_with_numbers
from bridge.capture.own_functions import OwnFunctions
from bridge.capture.passes.autocast import GradModesInRegions, spell_out_casts, without_casts
from bridge.capture.passes.copies import spell_out_copies
from bridge.capture.passes.decompose import decompose
from bridge.capture.passes.link_functions import link_functions
from bridge.capture.passes.stop_gradient import prepare
from bridge.capture.preconditions import check_call, device_of_call
from bridge.capture.random_nodes import eager_draws, match_draws
from bridge.capture.readings import Reading, ReadsDifferError, given, numbers_read
from bridge.capture.recomputed import recomputed
from bridge.capture.symbolic_capture import as_in_eager_at_sample, with_extents
from bridge.capture.symbolic_sizes import SymbolicSizes
from bridge.capture.thread_isolation import capturing
from bridge.capture.tracing import eagers_branches
from bridge.state import ModuleTensor, PythonState, generators_put_back, module_tensors

__all__ = ["capture"]

log = channel("dispatch")


@generators_put_back()
def capture(
    module: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    dims: Sequence[DynamicDim] = (),
    looped: Looped | None = None,
) -> Captured:
    """Captures the call ``module(*args, **kwargs)`` in the module's current mode.

    ``dims``: dimensions of arguments whose sizes become extents (:func:`bridge.capture.dynamic_shapes.dynamic_dims`).
    ``looped``: the call with its loops, if it was recorded already.

    Python attributes that its forward sets are left set: callers that need the
    module as it was take a :class:`bridge.state.snapshot.PythonState`.

    What the graph does not hold exactly (custom autograd functions, mutated arguments or Python state, ...) is listed
    in ``problems``; importing the graph refuses them together with the operators that have no conversion.

    Raises:
        UnsupportedModule: where no graph can be had: data-dependent control flow, hooks on submodules, ...; its
            ``cause`` is what torch raised.
        Exception: eager's own, where the sample is one that PyTorch itself refuses.
    """
    check_call(module, args, kwargs)
    refuse_numbers(type(module).__name__, dims)
    first = PythonState(module)
    device = device_of_call(module, args, kwargs)
    settle_attention_order(device)
    with collection_paused():
        export_tracer()  # before what it does to the process is replaced
    with working_for(device):
        captured = _capture(module, args, kwargs, dims, first, looped)
        attends_otherwise = captured.observation.attends_otherwise and not captured.problems
        if not goes_another_way(captured.problems) and not attends_otherwise:
            return captured
        left = PythonState(module)
        first.restore()
        with suppress(UnsupportedModule), eagers_branches():
            again = _capture(module, args, kwargs, dims, first)
            if not again.problems:
                return replace(again, as_eager=True)
        left.restore()  # the branch of eager cannot be traced: numbers decide in it, say
        return captured


def _capture(
    module: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    dims: Sequence[DynamicDim],
    first: PythonState,
    looped: Looped | None = None,
) -> Captured:
    """:func:`capture` in the branches of now; ``first``: the module's state as it is."""
    if not dims and (looped := looped or looped_call(module, args, kwargs, first)) is not None:
        captured = _capture_looped(module, args, kwargs, first, looped)
        if captured is not None:
            return captured
    traced = _traced_and_settled(module, args, kwargs, dims, first)
    captured = traced.captured
    forget_real_tensors([fake for fake in traced.fakes if isinstance(fake, FakeTensor)])
    if captured.problems:
        return captured
    before = PythonState(module)
    try:
        with capturing(module, fakes=False):
            real, differing = real_run(
                module,
                captured.module_tensors,
                traced.real_tensors,
                args,
                kwargs,
                captured.readings,
                functions=traced.functions,
                differentiates=captured.observation.differentiates,
                written={index - len(captured.module_tensors) for index, _ in captured.mutated},
            )
    finally:
        before.restore()
    compare = as_in_eager if captured.extents is None else as_in_eager_at_sample
    observation, differences = compare(captured.observation, real)
    observation.unsupported += [*differing, *differences]
    observation.reads_validation |= real.reads_validation
    observation.attends_otherwise = real.attends_otherwise
    return replace(captured, observation=observation, fake_observation=captured.observation)


def _capture_looped(
    module: nn.Module, args: tuple, kwargs: dict[str, Any], first: PythonState, looped: Looped
) -> Captured | None:
    """The captured call with one step of each loop in its graph; ``None`` where it has to be traced as it is."""
    try:
        with capturing(module), forward_here(module, looped.replay.of(module)):
            traced = _trace(module, args, kwargs, (), ())
    except Exception as error:  # of what the replay cannot do on fake tensors, the call itself may be traced
        log.debug("%s is traced without its loops", type(module).__name__, exc_info=error)
        return None
    finally:
        first.restore()
    captured = traced.captured
    forget_real_tensors([fake for fake in traced.fakes if isinstance(fake, FakeTensor)])
    real = replace(looped.observation, calls=captured.observation.calls)  # of all steps, which are one here
    observation, differences = as_in_eager(captured.observation, real)
    problems = [*observation.unsupported, *differences]
    if problems or [spec.kind for spec in captured.module_tensors].count("attribute"):
        log.debug("%s is traced without its loops: %s", type(module).__name__, problems)
        return None
    observation.reads_validation |= real.reads_validation
    return replace(captured, observation=observation, fake_observation=captured.observation, loops=True)


class _Traced(NamedTuple):
    """A captured call, the tensors that its ``module_tensors`` describe, the fake ones that entered its graph, the
    sizes that vary, and the user's own Functions."""

    captured: Captured
    real_tensors: list[torch.Tensor]
    fakes: list[Any]
    sizes: SymbolicSizes | None
    functions: OwnFunctions


def _traced_and_settled(
    module: nn.Module, args: tuple, kwargs: dict[str, Any], dims: Sequence[DynamicDim], first: PythonState
) -> _Traced:
    """The traced call; where forward sets Python attributes, traced once more from the state that it left.

    An attribute that the second run leaves alone (a window size that is clipped once) is a constant from then on; one
    that is only counted up is noted and put back; anything else that changes at every call is refused.
    """
    name = type(module).__name__
    before = first
    traced = _trace_or_refuse(module, args, kwargs, dims, first, before)
    before.restore_caches()
    counters, call = None, (args, kwargs)
    if (changed := before.changes()) and not traced.captured.problems:
        counters = counters_of(module, *call, changed, traced.captured.readings, traced.sizes)
        if counters is None:
            before = PythonState(module)
            traced = _trace_or_refuse(module, args, kwargs, dims, first, before)
            before.restore_caches()
            changed = before.changes()
            counters = counters_of(module, *call, changed, traced.captured.readings, traced.sizes) if changed else None
    if counters is not None:
        for each in counters:
            module.get_submodule(each.path).__dict__[each.name] = first.value_of(each.path, each.name)
        return traced._replace(captured=replace(traced.captured, counters=tuple(counters)))
    reason = "Python state that forward changes at every call; a compiled call runs no Python"
    hint = "keep it in a buffer, or change it outside of forward"
    traced.captured.problems.extend(Unsupported(what, f"{name}.forward", reason, hint) for what in changed)
    return traced


def _trace_or_refuse(
    module: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    dims: Sequence[DynamicDim],
    first: PythonState,
    before: PythonState,
) -> _Traced:
    """The traced call. If it cannot be had, ``first`` is put back and the sample is tried in eager.

    If forward reads numbers there, the call is traced once more with the numbers that it reads in the state ``before``
    (:mod:`bridge.capture.readings`). So it is where torch traced it for all of them: only positions are compiled so.

    Raises:
        Exception: eager's own, where eager refuses the sample too.
        UnsupportedModule: in short words; the chain of torch's exceptions is its ``cause``, and in the log.
    """
    traced = _trace_or_cause(module, args, kwargs, dims)
    is_traced = isinstance(traced, _Traced)
    if is_traced and not computes_with_numbers(traced.captured.graph):
        return traced
    # outside of the except clause, or each of these would show all of torch's exceptions above its own words
    first.restore()
    if isinstance(traced, UnsupportedModule):
        raise traced.with_traceback(None)  # of the trace that it ended
    try:
        with capturing(module, fakes=False):
            derivatives = raise_if_eager_raises(module, args, kwargs)
        before.restore()
        with capturing(module, fakes=False):
            readings = numbers_read(module, args, kwargs)
    finally:
        first.restore()
    if readings:
        before.restore()
        again = _trace_or_cause(module, args, kwargs, dims, readings)
        if isinstance(again, _Traced):
            return again
        first.restore()
        if isinstance(again, UnsupportedModule):
            raise again.with_traceback(None)
        traced = traced if is_traced or isinstance(again, ReadsDifferError) else again
    if is_traced:  # with the operator that is refused
        return traced
    name = type(module).__name__
    log.debug("%s cannot be captured", name, exc_info=traced)
    explained = explain_error(traced)
    raise UnsupportedModule(name, derivatives or [explained] if is_unknown(explained) else [explained], cause=traced)


def _trace_or_cause(
    module: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    dims: Sequence[DynamicDim],
    readings: Sequence[Reading] = (),
) -> _Traced | BaseException:
    """The traced call, or why torch could not trace it. Refusals of this package's and eager's errors are raised."""
    try:
        with capturing(module):
            return _trace(module, args, kwargs, dims, readings)
    except Exception as error:  # tracing and the fake run run the user's code, whatever that raises on fake tensors
        if isinstance(error, UnsupportedModule) or is_refused_by_eager(error):
            raise
        return error.__cause__ if isinstance(error, NotExportedError) else error


def _trace(
    module: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    dims: Sequence[DynamicDim],
    readings: Sequence[Reading],
) -> _Traced:
    """Exports the call, observes it on fake tensors and brings the two together.

    ``readings``: what forward reads. Where it reads nothing, or tracing needs nothing of it, none.
    """
    forward = f"{type(module).__name__}.forward"
    functions = OwnFunctions(type(module).__name__)
    with given(module, readings, returned=True):
        exported = export(module, args, kwargs, dims, functions)
    sizes = SymbolicSizes(dims, argument_values(exported)) if dims else None
    raise_deferred()
    tensors, real_tensors = module_tensors(module, constants(exported))
    unsupported = _elsewhere(tensors, real_tensors)
    unsupported += free_tensors(exported, {name for tensor in tensors for name in tensor.names})
    needing_grad = requiring_grad(exported, tensors, pytree.tree_leaves((args, kwargs)))

    def needs_grad(node: fx.Node) -> bool:
        return node.name in needing_grad

    unsupported += functions.problems
    if functions.uses:
        unsupported += link_functions(exported.graph_module, functions.uses, without_casts)
    spell_out_copies(exported.graph_module.graph)
    unsupported += spell_out_casts(exported.graph_module, ambient_autocast(), needs_grad)
    unsupported += prepare(exported.graph_module, needs_grad)
    with GradModesInRegions() as grad_modes, given(module, readings):
        run = fake_run(module, tensors, real_tensors, args, kwargs, sizes, functions)
    unsupported += grad_modes.problems
    raise_deferred()
    with autocast_to(None):  # its casts are in the graph by now
        by_origin = eager_draws(exported, run, forward, unsupported)
        functional = decompose(exported)
    raise_deferred()
    draw_of, unmatched = match_draws(functional.graph, by_origin, forward)
    observation = run.observation
    observation.unsupported += unsupported
    if not observation.unsupported:  # a draw that is refused already has no match either
        observation.unsupported += unmatched
    bound, literals = placeholders(functional, tensors, run.argument_is_tensor)
    results, mutated = results_and_mutations(functional, tensors, bound, forward, observation.unsupported)
    results, read = results[: len(results) - len(readings)], results[len(results) - len(readings) :]
    conditions, read = recomputed(functional.graph, read, readings, tensors, bound, literals)
    observation.unsupported += _uncounted(read, readings, dims)
    if len(results) != len(observation.outputs):
        reason = f"the exported graph returns {len(results)} values, eager {len(observation.outputs)}"
        raise UnsupportedModule(type(module).__name__, [Unsupported("torch.export", forward, reason)])
    for index, (node, output) in enumerate(zip(results, observation.outputs, strict=True)):
        if (node is not None) != output.is_tensor:
            reason = "is a tensor in eager and none in the exported graph, or the reverse"
            observation.unsupported.append(Unsupported(f"result {index}", forward, reason))
        elif node is not None and node.meta["val"].device != current_device():
            reason = f"is on device {node.meta['val'].device}, the module on {current_device()}"
            observation.unsupported.append(
                Unsupported(f"result {index}", forward, reason, "move it outside of forward")
            )
    captured = Captured(
        module_name=type(module).__name__,
        graph=functional.graph,
        placeholders=bound,
        module_tensors=tuple(tensors),
        arguments=run.arguments,
        argument_leaves=run.argument_leaves,
        argument_is_tensor=run.argument_is_tensor,
        in_spec=run.in_spec,
        results=tuple(results),
        mutated=tuple(mutated),
        observation=observation,
        fake_observation=observation,
        draw_of=draw_of,
        literals=literals,
        readings=tuple(readings),
        read=read,
        recomputed=conditions,
        device=current_device(),
    )
    fakes = [node.meta["val"] for node in captured.graph.nodes if node.op == "placeholder"]
    if sizes is not None:
        captured = with_extents(captured, sizes, args, kwargs)
    return _Traced(captured, real_tensors, [*fakes, *run.arguments], sizes, functions)


def _uncounted(
    read: Sequence[fx.Node | None], readings: Sequence[Reading], dims: Sequence[DynamicDim]
) -> list[Unsupported]:
    """Sizes that a call cannot count before anything else is done: of these each call would have others."""
    reason = (
        "the shape of what comes out depends on the numbers in a tensor, and sizes vary"
        if dims
        else "the shape of what comes out depends on numbers that forward computes of parameters or draws"
    )
    return [
        shape_by_numbers(reading.where, reason)
        for node, reading in zip(read, readings, strict=True)
        if reading.is_size and (dims or node is not None)
    ]


def _elsewhere(tensors: Sequence[ModuleTensor], real_tensors: Sequence[torch.Tensor]) -> list[Unsupported]:
    """What the module owns on another device than that of the call: attributes, which are no parameters."""
    return [
        Unsupported(f"a tensor on {real.device}", tensor.names[0], f"the module is on {current_device()}", "move it")
        for tensor, real in zip(tensors, real_tensors, strict=True)
        if real.device != current_device()
    ]
