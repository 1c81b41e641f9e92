"""Scaled dot-product attention, float32 or float64: a fused call -> ``softmax(q @ k^T * scale + mask) @ v`` in Relax.

The two products are library calls; one generated kernel computes the operators between them.

For float32 (without TF32) torch's fused kernel on a GPU multiplies without tensor cores, as the product library does,
and slower. The kernel for CPUs works on blocks that are small for the library, reads operands far apart in memory where
products of one input were merged, and returns another memory order than later products read. Both kernels pay off
where the scores are too large for the caches. Half types have fused kernels that are quicker than any formula.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvm.relax import op

from autodiff.body import Binding, Body, BodyScope, Scope, const, on_functions, walk
from autodiff.extents import same
from autodiff.ir import Call, Expr, TupleGetItem, dtype, itemsize, library_name, shape


def attended(q: Expr, k: Expr, v: Expr, mask: Expr | None, scope: Scope, *, scale: float, causal: bool = False) -> Expr:
    """Attention by torch's definition (A. Vaswani et al., "Attention Is All You Need", 2017, 3.2.1): q, k, v -> result.

    Half types are computed in float32. A query that may see no key gets zeros, as from torch's kernels.

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
    """Causal mask: numbers of queries and keys -> bool ``(queries, keys)``, true where a query sees a key."""
    rows, columns = (
        scope.emit(op.reshape(scope.emit(op.arange(0, count, 1, "int64"), "places"), extents), "places")
        for count, extents in ((queries, [-1, 1]), (keys, [1, -1]))
    )
    return scope.emit(op.greater_equal(rows, columns), "seen")


def _weights(scores: Expr, element_type: str, scope: Scope) -> Expr:
    """Softmax of each row; a row of ``-inf`` gives zeros: its sum is 0, and any other row's sum has a term of 1."""
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
"""Bytes of scores up to which the formula replaces a fused kernel: the GPU's kernel, the CPU's kernel."""

_KERNELS = (None, "efficient")
"""The kernels replaced: ``None`` where the call names none."""

_TYPES = ("float32", "float64")


@dataclass(frozen=True)
class _Fused:
    """The arguments of a fused attention.

    Attributes:
        kernel: the kernel that the call names, ``None`` if the operator has one kernel only.
        dropout: probability of a zero.
        rows_outside: whether the result's layout is ``(batch, queries, heads, width)``, otherwise that of ``q``.
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
        """Reads the arguments of a call by the conventions of :mod:`autodiff.library`."""
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
    """Replaces a fused attention of float32 or float64 by its formula where the scores' size is known and fits.

    Safe: the same function of the same numbers; the kernel rescales sums along a row, so results differ by rounding.
    """
    found = {binding for binding in body.bindings if _is_spelled(binding)}
    for binding, scope in walk(body):
        source = body.binding(binding.value.tuple_value) if isinstance(binding.value, TupleGetItem) else None
        if source in found:
            body.assign(binding, _spelled(_Fused.of(source.value), scope))


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
    """The formula in the layout of the library's result."""
    made = attended(fused.q, fused.k, fused.v, fused.mask, scope, scale=fused.scale, causal=fused.causal)
    if not fused.rows_outside:
        return made
    return op.permute_dims(scope.emit(made, "attended"), [0, 2, 1, 3])
