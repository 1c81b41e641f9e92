"""Kept lowerings: calls that an earlier process lowered, in the disk cache, found by what the call is and does.

As in :mod:`bridge.lowering.reuse`: by what a call looks like, and by the key of its record. What an in-process reuse
may take for granted is part of the key here: versions and sources of this package, torch's settings, and the source
files of the module's code.
Two processes that lower one call at once write the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from bridge.artifact import current_store, of_this_package
from bridge.base.devices import HOST, current_device
from bridge.base.log import channel
from bridge.base.torch_cuda import gpu_features, read_settings
from bridge.capture import RecordedCall
from bridge.compile import host_features
from bridge.lowering.canonical_key import NotCanonicalError, canonical
from bridge.lowering.lowered import LoweredCall
from bridge.lowering.record import KeptLowering, NotRecordedError, parts_of_lowering
from bridge.lowering.sources import code_digest

__all__ = [
    "call_on_disk",
    "keep_lowering",
    "kept_lowering",
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


def keep_lowering(call: str, observed: tuple, module: nn.Module, lowered: LoweredCall) -> None:
    """Puts a lowered call into the disk cache, if it can be written down; then its programs are known by it, too.

    ``observed``: the key of its record.
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
    log.info("%s is lowered already, in the disk cache", type(module).__name__)
    return KeptLowering(found.parts, recorded.given)


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
