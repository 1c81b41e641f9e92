"""Scaled dot-product attention as a formula: ``softmax(q @ k^T * scale + mask) @ v`` in Relax's own operators.

Attention of float32 -> its formula: products by the library, and one kernel for what lies between them.

For float32 (without TF32) torch's fused kernel on a GPU multiplies without tensor cores, as the library of products
does, and slower. The one for CPUs works on blocks that are small for the library, of operands that lie far apart where
products of one input were merged, and returns memory in another order than later products read. Both are worth their
while where the scores are too large for the caches. Half types have fused kernels that are quicker than any formula.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvm.relax import op

from autodiff.body import Binding, Body, BodyScope, Scope, const, on_functions
from autodiff.extents import same
from autodiff.ir import Call, Expr, TupleGetItem, dtype, itemsize, library_name, shape

__all__ = ["MOST_BYTES", "attended", "spell_attention"]


def attended(q: Expr, k: Expr, v: Expr, mask: Expr | None, scope: Scope, *, scale: float, causal: bool = False) -> Expr:
    """The formula as torch defines it (A. Vaswani et al., "Attention Is All You Need", 2017, 3.2.1).

    Half types are computed in float32. A query that may see no key at all gets zeros, as from torch's kernels.

    Args:
        q: ``(batch, heads, queries, width)``; k, v: of as many heads, ``(batch, heads, keys, width)``.
        mask: bool, where a query may see a key; or floats that are added. It broadcasts to the scores.
        causal: query ``i`` sees keys up to ``i``.

    Returns:
        ``(batch, heads, queries, width of v)``, not yet bound.
    """
    result, wide = dtype(q), "float64" if dtype(q) == "float64" else "float32"
    q, k, v = (each if dtype(each) == wide else scope.emit(op.astype(each, wide), "wide") for each in (q, k, v))
    turned = scope.emit(op.permute_dims(k, [0, 1, 3, 2]), "turned")
    scores = scope.emit(op.matmul(q, turned), "scores")
    scores = scope.emit(op.multiply(scores, const(scale, wide)), "scores")
    if causal:
        scores = scope.emit(op.where(_seen(shape(q)[-2], shape(k)[-2], scope), scores, _never(wide)), "scores")
    if mask is not None and dtype(mask) == "bool":
        scores = scope.emit(op.where(mask, scores, _never(wide)), "scores")
    elif mask is not None:
        bias = mask if dtype(mask) == wide else scope.emit(op.astype(mask, wide), "mask")
        scores = scope.emit(op.add(scores, bias), "scores")
    weights = _weights(scores, wide, scope) if mask is not None else scope.emit(op.nn.softmax(scores, -1), "weights")
    found = op.matmul(weights, v)
    return found if result == wide else op.astype(scope.emit(found, "attended"), result)


def _never(element_type: str) -> Expr:
    return const(float("-inf"), element_type)


def _seen(queries: int, keys: int, scope: Scope) -> Expr:
    """Of a causal attention."""
    rows, columns = (
        scope.emit(op.reshape(scope.emit(op.arange(0, count, 1, "int64"), "places"), extents), "places")
        for count, extents in ((queries, [-1, 1]), (keys, [1, -1]))
    )
    return scope.emit(op.greater_equal(rows, columns), "seen")


def _weights(scores: Expr, element_type: str, scope: Scope) -> Expr:
    """Softmax of rows, zeros for a row of ``-inf``: its sum is 0, which another row's, with a term of 1, never is."""
    zero, one = const(0.0, element_type), const(1.0, element_type)
    peak = scope.emit(op.max(scores, -1, keepdims=True), "peak")
    peak = scope.emit(op.where(scope.emit(op.equal(peak, _never(element_type)), "hidden"), zero, peak), "peak")
    grown = scope.emit(op.exp(scope.emit(op.subtract(scores, peak), "below")), "grown")
    total = scope.emit(op.sum(grown, -1, keepdims=True), "total")
    total = scope.emit(op.where(scope.emit(op.equal(total, zero), "hidden"), one, total), "total")
    return scope.emit(op.divide(grown, total), "weights")


MOST_BYTES = {
    "library.attention": 256 * 2**20,  # the fused kernel keeps none, and a call should need about as much as before
    "library.scaled_dot_product_flash_attention": 12 * 2**20,  # measured on a Xeon: .92 of the time at 1 MiB, .98 at 12
}
"""Of the scores, by the fused kernel that the formula takes the place of: that of a GPU, that of a CPU."""

_KERNELS = (None, "efficient")
"""Of those that a call names, if it does."""

_TYPES = ("float32", "float64")


@dataclass(frozen=True)
class _Fused:
    """The arguments of a fused attention.

    Attributes:
        kernel: of several, the one that computes it.
        dropout: probability of a zero.
        rows_outside: whether the result lies as ``(batch, queries, heads, width)``, otherwise as ``q``.
    """

    q: Expr
    k: Expr
    v: Expr
    mask: Expr | None
    causal: bool
    scale: float
    kernel: str | None
    dropout: float
    rows_outside: bool

    @classmethod
    def of(cls, call: Call) -> _Fused:
        """The conventions are those of :mod:`autodiff.library`."""
        kernel, arguments = None, list(call.args[1:])
        if library_name(call) == "library.attention":
            kernel = str(arguments.pop(0).value)
        q, k, v, has_mask, *rest = arguments
        mask = rest.pop(0) if bool(has_mask.value) else None
        dropout = 0.0 if kernel else float(rest.pop(0).value)
        causal, scale = rest
        return cls(q, k, v, mask, bool(causal.value), float(scale.value), kernel, dropout, bool(kernel))


@on_functions
def spell_attention(body: Body, frozen: int) -> None:
    """A fused attention of float32 or float64 whose scores are of a known size and fit becomes its formula.

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
            body.assign(binding, _spelled(_Fused.of(source.value), scope))
            body.counts.rewrites += 1
        scope.bindings.append(binding)
    body.finish(scope.bindings, {})
    body.prune()


def _is_spelled(binding: Binding) -> bool:
    most = MOST_BYTES.get(library_name(binding.value))
    if most is None:
        return False
    fused = _Fused.of(binding.value)
    q, k = fused.q, fused.k
    scores = [*shape(q)[:-1], shape(k)[-2]]
    fits = all(isinstance(extent, int) for extent in scores) and itemsize(dtype(q)) * math.prod(scores) <= most
    alike = all(map(same, shape(q)[:2], shape(k)[:2]))
    reads = all(isinstance(user.value, TupleGetItem) and user.value.index == 0 for user in binding.users)
    return fused.kernel in _KERNELS and not fused.dropout and dtype(q) in _TYPES and fits and alike and reads


def _spelled(fused: _Fused, scope: BodyScope) -> Expr:
    """As the library's result lies."""
    made = attended(fused.q, fused.k, fused.v, fused.mask, scope, scale=fused.scale, causal=fused.causal)
    if not fused.rows_outside:
        return made
    return op.permute_dims(scope.emit(made, "attended"), [0, 2, 1, 3])
