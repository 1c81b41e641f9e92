"""Memoized lowering: equal calls of different modules share one lowered call; of twelve equal layers, one is lowered.

A call is looked up in two steps. The *call key* is what it looks like before it is made: module classes, names and
layouts of tensors, shared memory, arguments, modes. The *key of its record* (:mod:`bridge.capture.record_call`) is what
it does: the operators in order, their constants, which tensors they read and which the call returns, and what numbers
Python code reads.

Why that is exact: two calls with equal keys run the same operators on the same inputs, so they are the same function of
their inputs. The record is made of the very module that is to be dispatched, so a layer whose ``forward`` reads a
global, or one of another dropout rate, has another key and is lowered by itself.

An entry of the cache lives as long as a dispatch entry uses it. What an earlier process lowered is found in the disk
cache by the same two keys: :mod:`bridge.lowering.reuse`.

Kept lowerings: calls that an earlier process lowered, in the disk cache, found by what the call is and does.

As in :mod:`bridge.lowering.reuse`: by what a call looks like, and by the key of its record. What an in-process reuse
may take for granted is part of the key here: versions and sources of this package, torch's settings, and the source
files of the module's code.
Two processes that lower one call at once write the same.
"""

from __future__ import annotations

import atexit
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from bridge.artifact import NoFormError, current_store, of_this_package
from bridge.base.devices import HOST, current_device, working_for
from bridge.base.errors import UnsupportedModule
from bridge.base.log import Stopwatch, channel
from bridge.base.session import SESSION
from bridge.base.torch_cuda import gpu_features, read_settings
from bridge.capture import Captured, LoopedCall, RecordedCall, capture, device_of_call, record_call
from bridge.compile import host_features
from bridge.lowering.call_key import NotCanonicalError, begin_reading, call_key_of, canonical, code_digest
from bridge.lowering.lowered import LoweredCall
from bridge.lowering.pipeline import lower_captured
from bridge.lowering.record import KeptLowering, parts_of_lowering
from bridge.state import SampleCall

__all__ = ["call_on_disk", "keep_lowering", "kept_lowering", "lower_once"]

_CALL, _LOWERING = "call", "lowering"

cache_log = channel("cache")


def call_on_disk(call_key: tuple | None) -> str | None:
    """The disk's key of a call that has not been run; ``None`` where there is no cache, or no such key."""
    if call_key is None or not current_store().is_usable:
        return None
    try:
        return of_this_package(_CALL, canonical(call_key), _surroundings())
    except NotCanonicalError as error:
        cache_log.info("a lowering is not kept: %s", error)
        return None


def keep_lowering(call: str, observed: tuple, module: nn.Module, lowered: LoweredCall) -> None:
    """Puts a lowered call into the disk cache, if it can be written down; then its programs are known by it, too.

    ``observed``: the key of its record.
    """
    key = _key(call, observed, module)
    if key is None:
        return
    try:
        parts = parts_of_lowering(lowered)
    except (NoFormError, NotCanonicalError, ValueError) as error:
        cache_log.info("%s: the lowering is not kept: %s", type(module).__name__, error)
        return
    lowered.content = KeptLowering.content_of(parts)
    name = f"{type(module).__module__}.{type(module).__qualname__}"
    current_store().put(_LOWERING, key, parts, name)


def kept_lowering(call: str, observed: tuple, module: nn.Module, recorded: RecordedCall) -> LoweredCall | None:
    """The lowered call of the disk cache that ran the same operators.

    Args:
        call: its key on the disk, of :func:`call_on_disk`.
        observed: the key of what it did.
        recorded: the call at hand.
    """
    key = _key(call, observed, module)
    found = None if key is None else current_store().get(_LOWERING, key)
    if found is None:
        return None
    cache_log.info("%s is lowered already, in the disk cache", type(module).__name__)
    return KeptLowering(found.parts, recorded.given)


def _key(call: str, observed: tuple, module: nn.Module) -> str | None:
    code = code_digest(module)
    if code is None:
        return None
    try:
        return of_this_package(_LOWERING, call, canonical(observed), code)
    except NotCanonicalError as error:
        cache_log.info("%s: the lowering is not kept: %s", type(module).__name__, error)
        return None


def _surroundings() -> list[Any]:
    """What shapes, strides and draws may depend on beside the call: the processor, the GPU, torch's settings."""
    device = current_device()
    found = [host_features(), torch.backends.mkldnn.enabled, torch.are_deterministic_algorithms_enabled()]
    if device != HOST:
        found += [*gpu_features(device), canonical(read_settings())]
    return found


log = channel("reuse")

#: By call key, then by the key of the record.
_LOWERED: dict[tuple, WeakValueDictionary[tuple, LoweredCall]] = SESSION.cache("lowerings", {})

# A value that dies is looked up by its key, and a key cannot be hashed any more when the modules are taken down.
atexit.register(_LOWERED.clear)


def lower_once(call: SampleCall, partition: Any, looped: LoopedCall | None = None, steady: bool = False) -> LoweredCall:
    """A call, lowered, or the lowered call of an equal one; with gradients where grad mode is on.

    The module is left as :func:`bridge.capture.record_call` leaves it.

    Args:
        partition: a strategy of :func:`partition.partition`. What was lowered with a strategy object that could
            change is not shared.
        looped: the call with loops of any length, which is not shared.
        steady: whether a call is refused of which each decides anew, by draws.

    Raises:
        UnsupportedModule, CompilationError: as :func:`bridge.lower.lower`.
    """
    watch = Stopwatch()
    if looped is not None:
        return _lowered(_decided(capture(call, looped), steady), partition, watch)
    recorded, module = record_call(call), call.module
    with working_for(device_of_call(call)):
        call_key = call_key_of(call, partition)
        key = None if call_key is None else recorded.key
        on_disk = None if key is None or call.dims else call_on_disk(call_key)
        found = None if key is None else _LOWERED.get(call_key, {}).get(key)
        if found is not None:
            log.info("%s runs the operators of a call that is lowered already", call.name)
            _decided(found.captured, steady)
            return found
        found = None if on_disk is None else kept_lowering(on_disk, key, module, recorded)
        if found is not None:
            _decided(found.captured, steady)
            found.seconds = watch.seconds
            _remember(call_key, key, found)
            return found
        if on_disk is not None:
            begin_reading(module)
        captured = _decided(recorded.captured(), steady)
        lowered = _lowered(captured, partition, watch)
        if key is not None:
            _remember(call_key, key, lowered)
            if on_disk is not None and not captured.problems:
                keep_lowering(on_disk, key, module, lowered)
        return lowered


def _decided(captured: Captured, steady: bool) -> Captured:
    """The captured call; where each decides anew, a refusal, if they are to be steady."""
    if steady and captured.by_draws:
        raise UnsupportedModule(captured.module_name, captured.decisions)
    return captured


def _lowered(captured: Captured, partition: Any, watch: Stopwatch) -> LoweredCall:
    """A captured call, lowered; ``watch``: since its capture began."""
    seconds = watch.seconds
    lowered = lower_captured(captured, grad=torch.is_grad_enabled(), partition=partition, capture_seconds=seconds)
    lowered.seconds = watch.seconds
    return lowered


def _remember(call_key: tuple, key: tuple, lowered: LoweredCall) -> None:
    for each in [each for each, held in _LOWERED.items() if not held]:
        del _LOWERED[each]
    _LOWERED.setdefault(call_key, WeakValueDictionary())[key] = lowered
