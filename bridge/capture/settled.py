"""Settled trace: a call → what was captured, in the state that its module is in from its second call on.

Where numbers decide, it is traced with the numbers that forward reads. Where it cannot be had, the sample is tried in
eager: what eager refuses is eager's error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from bridge.base.errors import CacheNotFilled, Unsupported, UnsupportedModule, is_refused_by_eager
from bridge.base.log import channel
from bridge.base.torch_internals import FakeTensor, pytree
from bridge.capture.counters import counters_of, may_be_counters
from bridge.capture.dynamic_shapes import DynamicDim
from bridge.capture.eager_error import raise_if_eager_raises
from bridge.capture.explain_error import explain_error, is_unknown
from bridge.capture.exported import NotExportedError
from bridge.capture.fake_run import fake_run
from bridge.capture.first_call import refuse_another_first_call
from bridge.capture.first_look import FirstLook, Observed
from bridge.capture.number_index import computes_with_numbers
from bridge.capture.number_reader import numbers_read
from bridge.capture.readings import Reading, ReadsDifferError
from bridge.capture.thread_isolation import capturing
from bridge.capture.traced import Traced, exported_call, trace_of
from bridge.state import PythonState, module_tensors, own_attributes

__all__ = ["traced_and_settled"]

log = channel("dispatch")

_NO_LOOK = FirstLook()


class _UnsettledError(Exception):
    """Forward sets Python attributes: it is to be traced from the state that it has left."""


def traced_and_settled(
    module: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    dims: Sequence[DynamicDim],
    first: PythonState,
    look: FirstLook,
) -> Traced:
    """The traced call; where forward sets Python attributes, traced once more from the state that it left.

    An attribute that the second run leaves alone (a window size that is clipped once) is a constant from then on; one
    that is only counted up is noted and put back; anything else that changes at every call is refused.

    Raises:
        CacheNotFilled: the call that sets it does something else than later ones.
    """
    name = type(module).__name__
    before, traced = first, None
    if look.left is not None:
        before = look.left
        before.restore()
    else:
        try:
            unsettled = partial(_sets_attributes, module, before)
            traced = _trace_or_refuse(module, args, kwargs, dims, first, before, unsettled, look)
        except _UnsettledError:
            before = _state_left(module, args, kwargs, first)
    if traced is None:
        traced = _trace_again(module, args, kwargs, dims, first, before)
    before.restore_caches()
    counters, call = None, (args, kwargs)
    if (changed := before.changes()) and not traced.captured.problems:
        counters = counters_of(module, *call, changed, traced.captured.readings, traced.sizes)
        if counters is None:
            before = PythonState(module)
            traced = _trace_again(module, args, kwargs, dims, first, before)
            before.restore_caches()
            changed = before.changes()
            counters = counters_of(module, *call, changed, traced.captured.readings, traced.sizes) if changed else None
    if before is not first and not traced.captured.problems and not (changed and counters is None):
        refuse_another_first_call(module, args, kwargs, first, before, traced.captured.readings)
    if counters is not None:
        for each in counters:
            module.get_submodule(each.path).__dict__[each.name] = first.value_of(each.path, each.name)
        return traced._replace(captured=replace(traced.captured, counters=tuple(counters)))
    reason = "Python state that forward changes at every call; a compiled call runs no Python"
    hint = "keep it in a buffer, or change it outside of forward"
    states = [Unsupported(what, f"{name}.forward", reason, hint) for what in changed]
    if states and traced.captured.problems:  # they may be the first call's alone: weights that begin with its batch
        first.restore()
        raise CacheNotFilled(name, [*traced.captured.problems, *states])
    traced.captured.problems.extend(states)
    return traced


def _sets_attributes(module: nn.Module, before: PythonState) -> bool:
    """Whether forward has set something since that is no counter: the rest of its trace would be made in vain."""
    before.restore_caches()
    changed = before.changes()
    return bool(changed) and not may_be_counters(module, changed)


def _state_left(module: nn.Module, args: tuple, kwargs: dict[str, Any], first: PythonState) -> PythonState:
    """The state that forward leaves, which torch.export has put back in parts; ``first`` where a fake run fails."""
    first.restore()
    try:
        with capturing(module):
            fake_run(module, *module_tensors(module), args, kwargs)
    except Exception:  # noqa: BLE001 - the trace that follows meets it again
        first.restore()
    first.restore_caches()
    return PythonState(module)


def _stand_ins(module: nn.Module) -> list[str]:
    """Names of what a run on fake tensors has put onto the module: tensors, and containers of them."""
    names = [name for name, buffer in module.named_buffers() if isinstance(buffer, FakeTensor)]
    return names + [
        f"{path}.{name}" if path else name
        for path, each in module.named_modules()
        for name, value in own_attributes(each)
        if any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves(value))
    ]


def _trace_again(
    module: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    dims: Sequence[DynamicDim],
    first: PythonState,
    before: PythonState,
) -> Traced:
    """The call traced from the state ``before`` that a run on fake tensors has left.

    Raises:
        CacheNotFilled: it reads a stand-in that this run has left.
    """
    made = _stand_ins(module)
    try:
        return _trace_or_refuse(module, args, kwargs, dims, first, before)
    except UnsupportedModule as error:
        if made and any(op.op in made or "fake tensor" in op.reason for op in error.ops):
            where, cause = f"{error.module_name}.forward", error.cause
            reason = "a tensor that forward makes at its first call and keeps on the module (a cache)"
            hint = "call the module once before; add_tvm_dispatch without a sample compiles its second call"
            caches = [Unsupported(f"self.{name}", where, reason, hint) for name in made]
            raise CacheNotFilled(error.module_name, caches, cause=cause) from None
        raise


def _trace_or_refuse(
    module: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    dims: Sequence[DynamicDim],
    first: PythonState,
    before: PythonState,
    unsettled: Callable[[], bool] = lambda: False,
    look: FirstLook = _NO_LOOK,
) -> Traced:
    """The traced call. If it cannot be had, ``first`` is put back and the sample is tried in eager.

    If forward reads numbers there, the call is traced once more with the numbers that it reads in the state ``before``
    (:mod:`bridge.capture.readings`). So it is where torch traced it for all of them: only positions are compiled so.

    ``unsettled``: asked once forward has run; where it says so, the trace ends. ``look``: where forward has failed
    already, its numbers are read first.

    Raises:
        _UnsettledError: it has ended.
        Exception: eager's own, where eager refuses the sample too.
        UnsupportedModule: in short words; the chain of torch's exceptions is its ``cause``, and in the log.
    """
    traced = look.failed or _trace_or_cause(module, args, kwargs, dims, (), unsettled, look.observed)
    is_traced = isinstance(traced, Traced)
    if is_traced and not computes_with_numbers(traced.captured.graph):
        return traced
    # outside of the except clause, or each of these would show all of torch's exceptions above its own words
    first.restore()
    if isinstance(traced, UnsupportedModule):
        raise traced.with_traceback(None)  # of the trace that it ended
    derivatives: list[Unsupported] = []
    try:
        if look.failed is None:
            with capturing(module, fakes=False):
                derivatives = raise_if_eager_raises(module, args, kwargs)
            before.restore()
        with capturing(module, fakes=False):
            readings = numbers_read(module, args, kwargs)
    finally:
        first.restore()
    if readings:
        before.restore()
        again = _trace_or_cause(module, args, kwargs, dims, readings, unsettled)
        if isinstance(again, Traced):
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
    readings: Sequence[Reading],
    unsettled: Callable[[], bool],
    earlier: Observed | None = None,
) -> Traced | BaseException:
    """The traced call, or why torch could not trace it. Refusals of this package's and eager's errors are raised.

    ``earlier``: what was observed of it, if it was.
    """
    try:
        with capturing(module):
            exported = exported_call(module, args, kwargs, dims, readings)
        if unsettled():
            raise _UnsettledError
        with capturing(module):
            return trace_of(*exported, module, args, kwargs, dims, readings, earlier)
    except Exception as error:  # tracing and the fake run run the user's code, whatever that raises on fake tensors
        if isinstance(error, UnsupportedModule | _UnsettledError) or is_refused_by_eager(error):
            raise
        return error.__cause__ if isinstance(error, NotExportedError) else error
