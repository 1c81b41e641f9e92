"""Opened operators: operators that the record replaces by the operators they call, because eager decides inside them.

    operators that autocast casts           the casts, of which eager caches some, and the operator on their results
    composites of them                      a recurrent layer, ``einsum``
    attention whose mask requires grad      the kernel that has a gradient for the mask
    recurrent layers of half types          steps that round, on the host

The inner calls pass torch's dispatcher again, so the recorder sees them like forward's own calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from bridge.base.devices import HOST, current_device
from bridge.base.torch_internals import aten, has_own_kernel, implements_composite, overload_packet
from bridge.base.torch_recording import has_casts, is_below_autocast
from bridge.capture.rows import Record, Row, ValueRef, values_in, written

CAST = aten.to.dtype
"""The operator that autocast calls to cast."""
LAYERED = (aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)
"""The operators that ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` call."""
_CONVERSIONS = (aten.to, aten.type_as)
"""The user's casts: composite operators that autocast leaves alone."""
_ATTENTION, _MASK = aten.scaled_dot_product_attention.default, "attn_mask"


def opening(
    func: Any, tensors: Sequence[torch.Tensor], args: tuple, kwargs: dict[str, Any], differentiates: bool
) -> bool | None:
    """Whether an operator with these operands is opened: ``True``, ``False`` for one that is opened if autocast casts
    inside or, where forward ``differentiates``, if it makes other tensors than its results (a formula may read them),
    or ``None`` if the operator itself is recorded."""
    kind = current_device().type
    if torch.is_autocast_enabled(kind) and not is_below_autocast():
        if any(each.is_floating_point() and each.device.type == kind for each in tensors):  # autocast skips the others
            if has_casts(func):
                return True
            is_composed = implements_composite(func) and not has_own_kernel(func, current_device())
            if is_composed and overload_packet(func) not in _CONVERSIONS:
                return False
    if func is _ATTENTION and torch.is_grad_enabled():
        mask = args[3] if len(args) > 3 else kwargs.get(_MASK)
        return True if isinstance(mask, torch.Tensor) and mask.requires_grad else None
    if func in LAYERED and current_device() == HOST and all(each.itemsize < 4 for each in tensors):
        return True
    if differentiates and torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
        if implements_composite(func) and not has_own_kernel(func, current_device()):
            return False
    return None


def casts_first(record: Record) -> Record:
    """A record with the casts of inputs that autocast caches moved to its front: otherwise the first step of a loop,
    which casts a weight, would differ from later steps."""
    casts = Counter(number for row in record.rows if (number := _input_cast(row, record)) is not None)
    memory = {record.memory[number] for row in record.rows for number in values_in(written(row))}
    kept = {number for number, count in casts.items() if count == 1 and record.memory[number] not in memory}
    rows = [row for row in record.rows if _input_cast(row, record) not in kept]
    first = [row._replace(draws=(0, 0)) for row in record.rows if _input_cast(row, record) in kept]
    return replace(record, rows=[*first, *rows]) if first else record


def _input_cast(row: Row, record: Record) -> int | None:
    """The input that a row casts, or ``None``."""
    source = row.args[0] if row.op is CAST else None
    return source.number if type(source) is ValueRef and source.number < record.inputs else None
