"""Capture: a module and a sample call → a functional ATen graph with everything that training needs beside it.

``torch.export`` traces the module in its current mode. Its training IR still has ``detach`` and ``no_grad`` regions;
the functional IR has lost them, so they are first rewritten into an operator of ours, ``tvm_dispatch::stop_gradient``.
A fake run observes what eager does and the graph no longer says, an eager run what fake tensors get wrong.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from bridge.base.collector import collection_paused
from bridge.base.devices import working_for
from bridge.base.errors import Unsupported, UnsupportedModule
from bridge.base.log import channel
from bridge.base.torch_cuda import settle_attention_order
from bridge.base.torch_export import export_tracer
from bridge.base.torch_internals import FakeTensor, pytree
from bridge.capture.captured import Captured
from bridge.capture.dynamic_shapes import DynamicDim, refuse_numbers
from bridge.capture.eager_run import as_in_eager, as_in_eager_at_sample, goes_another_way, real_run
from bridge.capture.fake_run import forget_real_tensors
from bridge.capture.first_look import Attention, FirstLook, first_look
from bridge.capture.loops.attempt import Looped, looped_call
from bridge.capture.loops.listener import loops_found
from bridge.capture.module_calls import forward_here
from bridge.capture.preconditions import check_call, device_of_call
from bridge.capture.record_call import record_call
from bridge.capture.recorded import captured_of_any_length
from bridge.capture.settled import traced_and_settled
from bridge.capture.tensor_contents import TensorContents
from bridge.capture.thread_isolation import capturing, recording
from bridge.capture.traced import trace
from bridge.capture.tracing import eagers_branches, times_forward_asked
from bridge.state import PythonState, generators_put_back

__all__ = ["capture"]

log = channel("dispatch")

#: Of modules by class, of calls by types of arguments: what the traced forward, which asked before whether it is
#: traced, gives its first attention; ``None``: eager's branches are not to be captured in its place.
_FIRST_ATTENTION: WeakKeyDictionary[type[nn.Module], dict[tuple, Attention | None]] = WeakKeyDictionary()


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
    if os.environ.get("BRIDGE_CAPTURE") == "recorded":
        if looped is None:
            return record_call(module, args, kwargs, dims).captured()
        with working_for(device_of_call(module, args, kwargs)), recording():
            return captured_of_any_length(module, args, kwargs, dims, looped)
    first = PythonState(module)
    contents = TensorContents(first.tensors())
    try:
        captured = _captured_on(module, args, kwargs, dims, first, looped)
    except BaseException:
        contents.restore()
        raise
    if captured.problems:
        contents.restore()
    return captured


def _captured_on(
    module: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    dims: Sequence[DynamicDim],
    first: PythonState,
    looped: Looped | None,
) -> Captured:
    """The captured call on the device of its tensors, with its loops if it has any."""
    device = device_of_call(module, args, kwargs)
    settle_attention_order(device)
    with collection_paused(objects_stay=True):
        export_tracer()  # before what it does to the process is replaced
    with working_for(device):
        if looped is None and not dims:
            looped = looped_call(module, args, kwargs, first)
            if looped is not None:
                loops_found()
        if looped is not None:
            captured = _capture_looped(module, args, kwargs, dims, first, looped)
            if captured is not None:
                return captured
            if dims:
                reason = "steps that are the same for all lengths cannot be traced for all of them"
                raise UnsupportedModule(type(module).__name__, [Unsupported("a loop", "forward", reason)])
        return _in_some_branches(module, args, kwargs, dims, first)


def _in_some_branches(
    module: nn.Module, args: tuple, kwargs: dict[str, Any], dims: Sequence[DynamicDim], first: PythonState
) -> Captured:
    """The captured call; in eager's branches where those are others and can be traced."""
    asked, refused = times_forward_asked(), None
    try:
        captured = _after_a_look(module, args, kwargs, dims, first)
    except UnsupportedModule as error:
        if times_forward_asked() == asked:
            raise
        refused = error
    if refused is not None:  # outside of the except clause, as what is raised here has nothing to do with it
        again = _in_eagers_branches(module, args, kwargs, dims, first)
        if again is None:
            raise refused.with_traceback(None)
        return again
    if captured.as_eager:
        return captured
    attends_otherwise = captured.observation.attends_otherwise and not captured.problems
    if not goes_another_way(captured.problems) and not attends_otherwise:
        return captured
    left = PythonState(module)
    again = _in_eagers_branches(module, args, kwargs, dims, first)
    if again is None:
        left.restore()
        return captured
    return again


def _in_eagers_branches(
    module: nn.Module, args: tuple, kwargs: dict[str, Any], dims: Sequence[DynamicDim], first: PythonState
) -> Captured | None:
    """The call captured anew in eager's branches; ``None`` where they cannot be traced: numbers decide in them, say."""
    first.restore()
    with suppress(UnsupportedModule), eagers_branches():
        again = _capture(module, args, kwargs, dims, first, FirstLook())
        if not again.problems:
            return replace(again, as_eager=True)
    return None


def _after_a_look(
    module: nn.Module, args: tuple, kwargs: dict[str, Any], dims: Sequence[DynamicDim], first: PythonState
) -> Captured:
    """The captured call; in eager's branches, if its first attention tells before any trace that they are others.

    What an earlier call of such a module told is taken for granted: either capture is right.
    """
    known = _FIRST_ATTENTION.setdefault(type(module), {})
    leaves, spec = pytree.tree_flatten((args, kwargs))
    such = spec, *map(type, leaves), *dict.fromkeys(type(each).__qualname__ for each in module.modules())
    look = FirstLook()
    if such not in known:
        look = first_look(module, args, kwargs, first)
        known[such] = look.attention
    if (traced := known[such]) is not None:
        captured = _attending_as_eager(module, args, kwargs, dims, first, traced)
        if captured is not None:
            return captured
        known[such] = None
    return _capture(module, args, kwargs, dims, first, look._replace(failed=None))  # torch.export may do what it cannot


def _attending_as_eager(
    module: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    dims: Sequence[DynamicDim],
    first: PythonState,
    traced: Attention,
) -> Captured | None:
    """The call as captured in eager's branches, if these give attention other arguments than ``traced``.

    ``None`` where they do not, and where they cannot be captured. Where numbers decide in them, what is traced in the
    others serves all numbers; but not if attention drops inside of a kernel, which numbers may choose.
    """
    look = first_look(module, args, kwargs, first, traced)
    if look.attention is not None or (look.failed is not None and not traced.drops):
        return None
    with suppress(UnsupportedModule), eagers_branches():
        captured = _capture(module, args, kwargs, dims, first, look)
        if not captured.problems and (traced.drops or not captured.readings):
            return replace(captured, as_eager=True)
    first.restore()
    return None


def _capture(
    module: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    dims: Sequence[DynamicDim],
    first: PythonState,
    look: FirstLook,
) -> Captured:
    """:func:`capture` in the branches of now, in which ``look`` was had; ``first``: the module's state as it is."""
    traced = traced_and_settled(module, args, kwargs, dims, first, look)
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
    module: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    dims: Sequence[DynamicDim],
    first: PythonState,
    looped: Looped,
) -> Captured | None:
    """The captured call with one step of each loop in its graph; ``None`` where it has to be traced as it is."""
    replay = looped.replay if looped.any_length is None else looped.any_length
    try:
        with capturing(module), forward_here(module, replay.of(module)):
            traced = trace(module, args, kwargs, dims, ())
    except Exception as error:  # of what the replay cannot do on fake tensors, the call itself may be traced
        log.debug("%s is traced without its loops", type(module).__name__, exc_info=error)
        return None
    finally:
        first.restore()
    captured = traced.captured
    forget_real_tensors([fake for fake in traced.fakes if isinstance(fake, FakeTensor)])
    real = replace(looped.observation, calls=captured.observation.calls)  # of all steps, which are one here
    compare = as_in_eager if captured.extents is None else as_in_eager_at_sample
    observation, differences = compare(captured.observation, real)
    problems = [*observation.unsupported, *differences]
    if problems or [spec.kind for spec in captured.module_tensors].count("attribute"):
        log.debug("%s is traced without its loops: %s", type(module).__name__, problems)
        return None
    observation.reads_validation |= real.reads_validation
    recorded = {"recording": looped.form, "any_length": looped.any_length}
    return replace(captured, observation=observation, fake_observation=captured.observation, loops=True, **recorded)
