"""Memoized lowering: equal calls of different modules share one lowered call; of twelve equal layers, one is captured.

A call is looked up in two steps. The *call key* is what it looks like before it is made: module classes, names and
layouts of tensors, shared memory, arguments, modes. The *observation key* is what a fake run of it does: the operators
in order, their constants, which tensors they read and which the call returns, and what numbers Python code reads.

Why that is exact: two calls with equal keys run the same operators on the same inputs, so they are the same function of
their inputs. The fake run is made in the very module that is to be dispatched, so a layer whose ``forward`` reads a
global, or one of another dropout rate, has another key and is captured by itself. A fake run takes about ten
milliseconds; capturing (``torch.export``, decomposition) and lowering a layer takes a few hundred.

Where sizes vary, the fake run is one on symbols, and the observation key has expressions for sizes and the conditions
that were concluded: :mod:`bridge.capture.size_trace`.

An entry of the cache lives as long as a dispatch entry uses it; :func:`clear_lowered` empties it. What an earlier
process lowered is found in the disk cache by the same two keys: :mod:`bridge.lowering.kept`.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from torch import nn

from bridge.base.devices import working_for
from bridge.base.errors import CompilationError
from bridge.base.log import channel
from bridge.base.torch_cuda import settle_attention_order
from bridge.capture import (
    Captured,
    DynamicDim,
    FakeRun,
    Looped,
    Observation,
    Reading,
    SizeTrace,
    capture,
    capturing,
    check_call,
    device_of_call,
    eagers_branches,
    fake_run,
    forget_real_tensors,
    forward_here,
    given,
    is_implied,
    numbers_read,
    observation_key,
    raise_if_eager_raises,
    record_call,
    recorded_loops,
    sized_run,
)
from bridge.lowering.call_key import call_key_of
from bridge.lowering.kept import (
    call_on_disk,
    has_loops_on_disk,
    has_readings_on_disk,
    is_as_eager_on_disk,
    is_on_disk,
    keep_lowering,
    kept_lowering,
    kept_lowering_of_runs,
)
from bridge.lowering.lowered import LoweredCall
from bridge.lowering.pipeline import lower_captured
from bridge.lowering.sources import begin_reading
from bridge.state import ModuleTensor, PythonState, generators_put_back, module_tensors

__all__ = ["clear_lowered", "lower_once"]

log = channel("reuse")

#: By call key, then by observation key.
_LOWERED: dict[tuple, WeakValueDictionary[tuple, LoweredCall]] = {}


def clear_lowered() -> None:
    """Empties the cache; entries go on with what they have."""
    _LOWERED.clear()


# A value that dies is looked up by its key, and a key cannot be hashed any more when the modules are taken down.
atexit.register(clear_lowered)


def lower_once(
    module: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    *,
    grad: bool,
    partition: Any,
    dims: Sequence[DynamicDim] = (),
    looped: Looped | None = None,
) -> LoweredCall:
    """``module(*args, **kwargs)``, lowered, or the lowered call of an equal one.

    The module is left as :func:`bridge.capture.pipeline` leaves it.

    Args:
        grad: whether gradients are wanted (grad mode is on).
        partition: a strategy of :func:`partition.partition`. What was lowered with a strategy object that could
            change is not shared.
        dims: dimensions of arguments whose sizes vary.
        looped: the call with loops of any length, which is not shared.

    Raises:
        UnsupportedModule, CompilationError: as :func:`bridge.lower.lower`.
    """
    check_call(module, args, kwargs)
    device = device_of_call(module, args, kwargs)
    settle_attention_order(device)
    with working_for(device):
        return _lower_once(module, args, kwargs, grad, partition, dims, looped)


def _lower_once(
    module: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    grad: bool,
    partition: Any,
    dims: Sequence[DynamicDim],
    looped: Looped | None,
) -> LoweredCall:
    if looped is None and os.environ.get("BRIDGE_CAPTURE") == "recorded":
        return _lower_recorded(module, args, kwargs, grad, partition, dims)
    started = time.perf_counter()
    call_key = None if looped is not None else call_key_of(module, args, kwargs, grad, partition, dims)
    known = _LOWERED.get(call_key) if call_key is not None else None
    on_disk = None if dims else call_on_disk(call_key)
    for as_eager in _branches(known, on_disk):
        alike = [lowered.captured for lowered in (known or {}).values() if _by_eagers(lowered.captured) == as_eager]
        if not (dims or as_eager) and (has_loops_on_disk(on_disk) or any(each.loops for each in alike)):
            looped = recorded_loops(module, args, kwargs)
        reads = any(each.readings for each in alike) or has_readings_on_disk(on_disk)
        seen = _observe(module, args, kwargs, reads, dims, looped, as_eager)
        key = seen.key
        found = known.get(key) if known else None
        if found is not None:
            log.info("%s runs the operators of a call that is lowered already", type(module).__name__)
            return found
        if on_disk is not None and key is not None:
            recording = None if looped is None else looped.form
            seen_so = seen.tensors, seen.run, seen.eagers, seen.readings, recording
            found = kept_lowering_of_runs(on_disk, key, module, *seen_so)
        if found is not None:
            forget_real_tensors(seen.run.arguments)
            found.seconds = time.perf_counter() - started
            _remember(call_key, key, found)
            return found
        if seen.before is not None:
            seen.before.restore()
    if on_disk is not None:
        begin_reading(module)
    captured = capture(module, args, kwargs, dims, looped)
    seconds = time.perf_counter() - started
    try:
        lowered = lower_captured(captured, grad=grad, partition=partition, capture_seconds=seconds)
    except CompilationError:
        raise_if_eager_raises(module, args, kwargs)  # fake tensors let some mistakes pass (mixed types in a product)
        raise
    lowered.seconds = time.perf_counter() - started
    if dims:
        observed_key = _observe_all_sizes(module, args, kwargs, dims, captured) if call_key is not None else None
    else:
        observed_key = observation_key(captured.fake_observation, captured.readings)
        if captured.loops:
            observed_key = _with_loops(observed_key, captured.observation)
        elif captured.as_eager:
            observed_key = _as_eager_key(captured.fake_observation, captured.readings)
        elif observed_key is not None and captured.fake_observation.asks:
            eagers = _eagers_run(module, args, kwargs, PythonState(module))
            observed_key = (*observed_key, None if eagers is None else observation_key(eagers.observation, ()))
    owned = all(tensor.kind not in ("attribute", "free") for tensor in captured.module_tensors)
    if call_key is not None and observed_key is not None and owned and not captured.counters:
        _remember(call_key, observed_key, lowered)
        if on_disk is not None and not captured.problems:
            keep_lowering(on_disk, observed_key, module, lowered)
    return lowered


def _lower_recorded(
    module: nn.Module, args: tuple, kwargs: dict[str, Any], grad: bool, partition: Any, dims: Sequence[DynamicDim]
) -> LoweredCall:
    started = time.perf_counter()
    call_key = call_key_of(module, args, kwargs, grad, partition, dims)
    on_disk = None if dims else call_on_disk(call_key)
    call = record_call(module, args, kwargs, dims)
    key = None if call_key is None else call.key
    if key is not None:
        found = _LOWERED.get(call_key, {}).get(key)
        if found is not None:
            log.info("%s runs the operators of a call that is lowered already", type(module).__name__)
            return found
        found = None if on_disk is None else kept_lowering(on_disk, key, module, call)
        if found is not None:
            found.seconds = time.perf_counter() - started
            _remember(call_key, key, found)
            return found
    if on_disk is not None:
        begin_reading(module)
    captured = call.captured()
    seconds = time.perf_counter() - started
    lowered = lower_captured(captured, grad=grad, partition=partition, capture_seconds=seconds)
    lowered.seconds = time.perf_counter() - started
    if key is not None:
        _remember(call_key, key, lowered)
        if on_disk is not None and not captured.problems:
            keep_lowering(on_disk, key, module, lowered)
    return lowered


def _branches(known: Mapping[Any, LoweredCall] | None, on_disk: str | None) -> list[bool]:
    """Whether calls that look like this one were lowered in eager's branches, or as they are traced, or both."""
    found = {_by_eagers(lowered.captured) for lowered in known.values()} if known else set()
    if is_on_disk(on_disk):
        found.add(is_as_eager_on_disk(on_disk))
    return sorted(found, reverse=True)


def _by_eagers(captured: Captured) -> bool:
    """Whether a call is known by what it does in eager's branches alone."""
    return captured.as_eager and not captured.loops


def _with_loops(key: tuple | None, observation: Observation) -> tuple | None:
    """The observation key of a call with one step in the place of a loop's; ``observation``: of its eager run.

    The marks of the steps are operators of the trace: calls of equal traces have the same loops.
    """
    return None if key is None else (*key, "loops", observation.reads_validation)


def _remember(call_key: tuple, observed_key: tuple, lowered: LoweredCall) -> None:
    for key in [key for key, held in _LOWERED.items() if not held]:
        del _LOWERED[key]
    _LOWERED.setdefault(call_key, WeakValueDictionary())[observed_key] = lowered


class _Seen(NamedTuple):
    """What a call was seen to do.

    Attributes:
        key: the observation key, ``None`` where only a capture can tell.
        tensors: the module's.
        run: where no size varies.
        eagers: the run in the branches of eager, where forward asks whether it is traced.
        before: the state before, where the module is left with attributes that forward sets.
        readings: what forward read in eager.
    """

    key: tuple | None = None
    tensors: Sequence[ModuleTensor] = ()
    run: FakeRun | None = None
    eagers: FakeRun | None = None
    before: PythonState | None = None
    readings: Sequence[Reading] = ()


@generators_put_back()
def _observe(
    module: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    reads: bool,
    dims: Sequence[DynamicDim],
    looped: Looped | None = None,
    as_eager: bool = False,
) -> _Seen:
    """What a fake run shows of a call.

    The module is left as it was. Where forward sets attributes at its first call and leaves them alone from then on, it
    is the second call that is observed, as it is the second one that is captured: the module is left with them.

    ``reads``: calls like this one read numbers, which takes an eager run before. ``dims``: what is to be observed for
    all sizes; the key ends with what was concluded about them. ``looped``: the call with its loops, of which one step
    is observed. ``as_eager``: in eager's branches, if forward asks whether it is traced, and in no others.
    """
    first = before = PythonState(module)
    if looped is not None:
        return _observe_looped(module, args, kwargs, first, looped)
    key_of, earlier = _as_eager_key if as_eager else observation_key, None
    for _ in range(2):
        try:
            with eagers_branches() if as_eager else nullcontext():
                observed = _observed(module, args, kwargs, reads, dims, before)
        except Exception:  # noqa: BLE001 - the capture that follows meets it again, and says what it is
            first.restore()
            return _Seen()
        observation, readings, tensors, run, about_sizes = observed
        key = key_of(observation, readings)
        before.restore_caches()
        if not before.changes():
            break
        before, earlier = PythonState(module), key
    else:
        first.restore()
        return _Seen()
    if before is not first and key != earlier:  # what the first call does is not known: the capture says so
        first.restore()
        return _Seen()
    eagers = run if as_eager else None
    if key is not None and observation.asks:
        eagers = None if dims else _eagers_run(module, args, kwargs, before, run)
        eagers_key = None if eagers is None else observation_key(eagers.observation, ())
        key = None if dims else (*key, eagers_key)
    if key is None:
        first.restore()
        return _Seen()
    return _Seen((*key, *about_sizes), tensors, run, eagers, None if before is first else first, readings)


def _observe_looped(
    module: nn.Module, args: tuple, kwargs: dict[str, Any], first: PythonState, looped: Looped
) -> _Seen:
    """What a fake run shows of a recorded call, with one step of each loop."""
    tensors, real_tensors = module_tensors(module)
    try:
        with capturing(module), forward_here(module, looped.replay.of(module)):
            run = fake_run(module, tensors, real_tensors, args, kwargs)
    except Exception:  # noqa: BLE001 - the capture that follows meets it again
        return _Seen()
    finally:
        first.restore()
    return _Seen(_with_loops(observation_key(run.observation, ()), looped.observation), tensors, run)


def _observed(
    module: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    reads: bool,
    dims: Sequence[DynamicDim],
    before: PythonState,
) -> tuple[Observation, Sequence[Reading], list[ModuleTensor], FakeRun | None, list[SizeTrace]]:
    """A fake run; Python attributes that forward sets are left set. Numbers are read in the state ``before``."""
    readings: tuple[Reading, ...] = ()
    if reads:
        with capturing(module, fakes=False):
            readings = numbers_read(module, args, kwargs)
        before.restore()
    with capturing(module), given(module, readings):
        if dims:
            observation, *about_sizes = sized_run(module, args, kwargs, dims)
            return observation, readings, [], None, about_sizes
        tensors, real_tensors = module_tensors(module)
        run = fake_run(module, tensors, real_tensors, args, kwargs)
        return run.observation, readings, tensors, run, []


@generators_put_back()
def _eagers_run(
    module: nn.Module, args: tuple, kwargs: dict[str, Any], before: PythonState, earlier: FakeRun | None = None
) -> FakeRun | None:
    """A fake run in eager's branches, of a call that asks whether it is traced; ``None`` where numbers decide.

    What eager does there is no part of what is traced. The module is left as it was, ``before``. ``earlier``: a run of
    the same call in the other branches.
    """
    try:
        with capturing(module), eagers_branches():
            run = fake_run(module, *module_tensors(module), args, kwargs, earlier=earlier)
    except Exception:  # noqa: BLE001 - it runs the user's code, whatever that raises on fake tensors
        before.restore()
        return None
    before.restore()
    forget_real_tensors(run.arguments)
    return run


def _observe_all_sizes(
    module: nn.Module, args: tuple, kwargs: dict[str, Any], dims: Sequence[DynamicDim], captured: Captured
) -> tuple | None:
    """The observation key of a call that was captured for all sizes; ``None`` where it is not to be shared: what it was
    observed to do might be something else for sizes that the captured call serves."""
    if captured.readings:
        return None
    key = _observe(module, args, kwargs, False, dims, as_eager=captured.as_eager).key
    return key if key is not None and is_implied(key[-1], captured) else None


def _as_eager_key(observation: Observation, readings: Sequence[Reading]) -> tuple | None:
    """The same of a call in eager's branches: what it does there is what was lowered, whatever is traced elsewhere."""
    key = observation_key(observation, readings)
    return None if key is None else (*key, "as eager")
