"""Scaled dot-product attention as a formula: ``softmax(q @ k^T * scale + mask) @ v`` in Relax's own operators."""

from __future__ import annotations

from tvm.relax import op

from autodiff.constants import const
from autodiff.ir import Expr, dtype, shape
from autodiff.rewrite import Scope

__all__ = ["attended"]


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
