"""Kept lowerings: calls that an earlier process lowered, in the disk cache, found by what the call is and does.

As in :mod:`bridge.lowering.reuse` a call is looked up in two steps: is there one that looks like it, then, after a fake
run of this very module, one that ran the same operators and, if its forward takes numbers out of tensors, read the same
numbers on its sample. What an in-process reuse may take for granted is part of the
key here: versions and sources of this package, torch's settings, and the source files of the module's code.
Two processes that lower one call at once write the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from bridge.artifact import current_store, of_this_package
from bridge.base.devices import HOST, current_device
from bridge.base.log import channel
from bridge.base.torch_cuda import gpu_features, read_settings
from bridge.capture import FakeRun, Reading, RecordedCall
from bridge.compile import host_features
from bridge.lowering.canonical_key import NotCanonicalError, canonical
from bridge.lowering.graph_record import NotRecordedError
from bridge.lowering.lowered import LoweredCall
from bridge.lowering.record import KeptLowering, parts_of_lowering
from bridge.lowering.sources import code_digest
from bridge.state import ModuleTensor

__all__ = [
    "call_on_disk",
    "has_loops_on_disk",
    "has_readings_on_disk",
    "is_as_eager_on_disk",
    "is_on_disk",
    "keep_lowering",
    "kept_lowering",
    "kept_lowering_of_runs",
    "marks_on_disk",
]

_CALL, _LOWERING = "call", "lowering"

log = channel("cache")


def call_on_disk(call_key: tuple | None) -> str | None:
    """The disk's key of a call that has not been run; ``None`` where there is no cache, or no such key."""
    if call_key is None or not current_store().is_usable:
        return None
    try:
        return of_this_package(_CALL, canonical(call_key), _surroundings())
    except NotCanonicalError as error:
        log.info("a lowering is not kept: %s", error)
        return None


def is_on_disk(call: str | None) -> bool:
    """Whether some call of this key was lowered: whether it is worth to observe one."""
    return call is not None and current_store().get(_CALL, call) is not None


def has_loops_on_disk(call: str | None) -> bool:
    """Whether a call of this key was lowered with one step in the place of a recorded loop's."""
    return call is not None and current_store().get(_CALL, _of_loops(call)) is not None


def has_readings_on_disk(call: str | None) -> bool:
    """Whether a call of this key was lowered in the branches that numbers out of tensors decided about."""
    return call is not None and current_store().get(_CALL, _of_readings(call)) is not None


def is_as_eager_on_disk(call: str | None) -> bool:
    """Whether a call of this key was lowered in eager's branches, where forward asks if it is traced."""
    return call is not None and current_store().get(_CALL, _of_eager(call)) is not None


def marks_on_disk(call: str) -> tuple[str, ...]:
    """Keys of all that may say something of a call on the disk: that it was lowered, and how."""
    return call, _of_loops(call), _of_eager(call), _of_readings(call)


def _of_eager(call: str) -> str:
    return of_this_package(_CALL, call, "as eager")


def _of_loops(call: str) -> str:
    return of_this_package(_CALL, call, "loops")


def _of_readings(call: str) -> str:
    return of_this_package(_CALL, call, "readings")


def keep_lowering(call: str, observed: tuple, module: nn.Module, lowered: LoweredCall) -> None:
    """Puts a lowered call into the disk cache, if it can be written down; then its programs are known by it, too.

    ``observed``: the observation key of its fake run.
    """
    key = _key(call, observed, module)
    if key is None:
        return
    try:
        parts = parts_of_lowering(lowered)
    except (NotRecordedError, NotCanonicalError, ValueError) as error:
        log.info("%s: the lowering is not kept: %s", type(module).__name__, error)
        return
    lowered.content = KeptLowering.content_of(parts)
    name = f"{type(module).__module__}.{type(module).__qualname__}"
    current_store().put(_LOWERING, key, {**parts, "found_by": call.encode()}, name)
    current_store().put(_CALL, call, {}, name)
    if lowered.captured.loops:
        current_store().put(_CALL, _of_loops(call), {}, name)
    elif lowered.captured.as_eager:
        current_store().put(_CALL, _of_eager(call), {}, name)
    if lowered.captured.readings:
        current_store().put(_CALL, _of_readings(call), {}, name)


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
    log.info("%s is lowered already, in the disk cache", type(module).__name__)
    return KeptLowering(found.parts, recorded.given)


def kept_lowering_of_runs(
    call: str,
    observed: tuple,
    module: nn.Module,
    tensors: Sequence[ModuleTensor],
    run: FakeRun,
    eagers: FakeRun | None = None,
    readings: Sequence[Reading] = (),
    recording: Any = None,
) -> LoweredCall | None:
    """The lowered call of the disk cache that ran the same operators.

    Args:
        run: the fake run that says so.
        eagers: the one in the branches of eager, of a call that asks whether it is traced.
        readings: what forward read out of tensors before, and was given in that run; ``observed`` has them.
        recording: the folded form of its loops, if they were recorded.
    """
    key = _key(call, observed, module)
    found = None if key is None else current_store().get(_LOWERING, key)
    if found is None:
        return None
    if KeptLowering.is_as_eager(found.parts):
        if eagers is None:
            return None
        run = eagers
    given: dict[str, Any] = {
        "module_name": type(module).__name__,
        "module_tensors": tuple(tensors),
        "arguments": run.arguments,
        "argument_leaves": run.argument_leaves,
        "argument_is_tensor": run.argument_is_tensor,
        "in_spec": run.in_spec,
        "observation": run.observation,
        "readings": tuple(readings),
        "recording": recording,
        "device": current_device(),
    }
    log.info("%s is lowered already, in the disk cache", type(module).__name__)
    return KeptLowering(found.parts, given)


def _key(call: str, observed: tuple, module: nn.Module) -> str | None:
    code = code_digest(module)
    if code is None:
        return None
    try:
        return of_this_package(_LOWERING, call, canonical(observed), code)
    except NotCanonicalError as error:
        log.info("%s: the lowering is not kept: %s", type(module).__name__, error)
        return None


def _surroundings() -> list[Any]:
    """What shapes, strides and draws may depend on beside the call: the processor, the GPU, torch's settings."""
    device = current_device()
    found = [host_features(), torch.backends.mkldnn.enabled, torch.are_deterministic_algorithms_enabled()]
    if device != HOST:
        found += [*gpu_features(device), canonical(read_settings())]
    return found
