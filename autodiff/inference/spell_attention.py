"""Attention of float32 -> its formula: products by the library, and one kernel for what lies between them.

For float32 (without TF32) torch's fused kernel on a GPU multiplies without tensor cores, as the library of products
does, and slower. Half types have fused kernels that are quicker than any formula.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tvm.relax import op

from autodiff.attention import attended
from autodiff.body import Binding, Body, on_functions
from autodiff.extents import same
from autodiff.ir import Call, Expr, TupleGetItem, dtype, itemsize, library_name, shape
from autodiff.rewrite import BodyScope

__all__ = ["MOST_BYTES", "spell_attention"]

MOST_BYTES = 256 * 2**20
"""Of the scores: the fused kernel keeps none, and what a call needs at most should stay about as it is."""

_KERNELS = ("efficient",)
_TYPES = ("float32", "float64")


@on_functions
def spell_attention(body: Body, frozen: int) -> None:
    """``library.attention`` of float32, whose scores are of a known size and fit, becomes its formula.

    Safe: the same function of the same numbers; the kernel rescales sums while it goes along a row, the formula does
    not, so results differ at rounding level.
    """
    found = {binding for binding in body.bindings if _is_spelled(binding)}
    if not found:
        return
    scope = BodyScope(body)
    for binding in body.bindings:
        source = body.binding(binding.value.tuple_value) if isinstance(binding.value, TupleGetItem) else None
        if source in found:
            body.assign(binding, _spelled(source.value, scope))
            body.counts.rewrites += 1
        scope.bindings.append(binding)
    body.finish(scope.bindings, {})
    body.prune()


def _is_spelled(binding: Binding) -> bool:
    if library_name(binding.value) != "library.attention":
        return False
    kernel, q, k, _, *_ = _arguments(binding.value)
    scores = [*shape(q)[:-1], shape(k)[-2]]
    fits = all(isinstance(extent, int) for extent in scores) and itemsize(dtype(q)) * math.prod(scores) <= MOST_BYTES
    alike = all(map(same, shape(q)[:2], shape(k)[:2]))
    reads = all(isinstance(user.value, TupleGetItem) and user.value.index == 0 for user in binding.users)
    return kernel in _KERNELS and dtype(q) in _TYPES and fits and alike and reads


def _arguments(call: Call) -> Sequence:
    """Kernel, q, k, v, mask or ``None``, causal, scale."""
    kernel, q, k, v, has_mask, *rest = call.args[1:]
    mask = rest.pop(0) if bool(has_mask.value) else None
    causal, scale = rest
    return str(kernel.value), q, k, v, mask, bool(causal.value), float(scale.value)


def _spelled(call: Call, scope: BodyScope) -> Expr:
    """As the library's result lies: ``(batch, queries, heads, width)``."""
    _, q, k, v, mask, causal, scale = _arguments(call)
    made = scope.emit(attended(q, k, v, mask, scope, scale=scale, causal=causal), "attended")
    return op.permute_dims(made, [0, 2, 1, 3])
