"""Number checks: scalar guards and other conditions → one number, the index of the first that does not hold.

A compiled call takes the sample's branch. Its result is eager's where every number that decides the branch equals the
sample's, bit by bit; the compiled function checks that, and returns the index beside its results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import fx
from tvm import relax
from tvm.relax import op

from autodiff.ir import Expr, dtype, numel
from bridge.base.errors import Unsupported
from bridge.base.torch_internals import aten
from bridge.capture import OVERWRITTEN, STOP_GRADIENT, Captured, ScalarGuard

COMPUTED = "a floating point number that forward computes and then reads: compiled code may round it otherwise"
_HINT = "keep it a tensor (detached, if autograd is not to follow), or read a comparison: `if (x > 1).all()`"

_SHOWN = 40
"""Characters of a list of numbers that a reason quotes."""

#: Operators whose results are elements of their operands, so that no rounding happens.
_MOVES = {
    STOP_GRADIENT,
    OVERWRITTEN,
    *(getattr(aten, name).default for name in "alias amax amin clone detach expand permute squeeze unsqueeze".split()),
    *(getattr(aten, name).default for name in "lift_fresh_copy max min repeat reshape view _unsafe_view".split()),
    *(aten.item.default, aten._local_scalar_dense.default, aten.select.int, aten.slice.Tensor, aten.squeeze.dim),
    *(aten.squeeze.dims, aten.index.Tensor, aten.index_select.default, aten.gather.default, aten.cat.default),
}


def computed_numbers(captured: Captured) -> list[Unsupported]:
    """The floating point scalar guards that are computed, not just moved, from the call's own tensors."""
    return [
        Unsupported("a number that forward reads", reading.where, COMPUTED, _HINT)
        for node, reading in zip(captured.read, captured.numbers.guards, strict=True)
        if node is not None and reading.dtype.is_floating_point and not _is_moved(node)
    ]


def _is_moved(node: fx.Node) -> bool:
    while node.op == "call_function":
        if node.target not in _MOVES or not all(map(_is_moved, node.all_input_nodes[1:])):
            return False
        node = node.all_input_nodes[0]
    return node.op == "placeholder"


def holds(importer: Any, value: Expr, reading: ScalarGuard) -> Expr:
    """Whether ``value`` equals the guard's number; zeros are compared by sign, nan equals nan."""
    value = importer.reshape(value, (reading.count,))
    numbers = np.array(reading.value).reshape(-1)
    if not reading.dtype.is_floating_point:
        same = importer.emit(op.equal(value, relax.const(numbers.astype(dtype(value)), dtype(value))))
        return _all(importer, same)
    wide = "float64" if reading.dtype is torch.float64 else "float32"
    value, numbers = importer.cast(value, wide), numbers.astype(wide)
    emit, constant = importer.emit, lambda array: relax.const(array, str(array.dtype))
    sign = emit(op.greater(emit(op.divide(importer.constant(1, wide), value)), importer.constant(0, wide)))
    # the sign of a zero; any other number includes its sign
    same_sign = emit(op.logical_or(emit(op.equal(sign, constant(~np.signbit(numbers)))), constant(numbers != 0)))
    without_nan = constant(np.where(np.isnan(numbers), 0, numbers).astype(wide))
    equal = emit(op.logical_and(emit(op.equal(value, without_nan)), same_sign))
    is_nan = emit(op.logical_and(emit(op.isnan(value)), constant(np.isnan(numbers))))
    number = emit(op.logical_and(equal, constant(~np.isnan(numbers))))
    return _all(importer, emit(op.logical_or(number, is_nan)))


def _all(importer: Any, flags: Expr) -> Expr:
    if numel(flags) == 1:
        return importer.reshape(flags, ())
    broken = importer.emit(op.sum(importer.cast(importer.emit(op.logical_not(flags)), "int64")))
    return importer.emit(op.equal(broken, importer.constant(0, "int64")))


def first_broken(importer: Any, conditions: Sequence[Expr]) -> Expr:
    """The index of the first condition that does not hold, from 1 on; 0 if all hold. int64, 0-d."""
    code: Expr = importer.constant(0, "int64")
    for place in range(len(conditions), 0, -1):
        code = importer.emit(op.where(conditions[place - 1], code, importer.constant(place, "int64")))
    return code


def compared(reading: ScalarGuard) -> str:
    """The guard's number, and the number where the check fails, in words."""
    if reading.value is True or reading.value is False:
        return f"compiled for {reading.value}, called with {not reading.value}"
    text = repr(reading.value)
    return f"compiled for {text if len(text) <= _SHOWN else text[:_SHOWN] + '...'}, called with another"
