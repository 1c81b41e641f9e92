"""Eager with other orders inside its sums: overflows on the way depend on the kernel, not on the operator's meaning.

``max + max / 2 - max`` is infinite from the left, finite from the right; a vectorized kernel adds every eighth element
first, a blocked one blocks. The same holds for ``a + alpha * b``, which eager's vectorized kernels round once and
scalar ones twice: ``max - 2 * max`` is ``-max`` or ``-inf``; for ``addcmul``, whose product may overflow by itself; for
``lerp``; and for BatchNorm, whose kernel for transposed inputs sums in float64, so that squares do not overflow, while
the one for contiguous inputs does not. LayerNorm and GroupNorm of a row whose squares overflow are 0 or nan, by the
length of the row, and nan where a sum overflows, also of equal elements, whose running mean is exact.

Variances are a running mean (Welford) in eager: ``max - -max`` overflows there and the variance is nan; two passes
have a finite mean and ``inf``; ``max`` twice has variance 0 there, and ``inf`` or nan where the sum overflows, plain or
of distances from one element. The same holds for their gradients, which compute the mean once more.
BatchNorm in training sums float32 in float64 in eager: finite, where a sum in float32 overflows and its channel is nan.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tests.operator_mode import OperatorMode

aten = torch.ops.aten

SCALED = {aten.add.Tensor: 1, aten.sub.Tensor: 1, aten.add_.Tensor: 1, aten.sub_.Tensor: 1, aten.rsub.Tensor: 0}
"""Operators → the position of the operand that they multiply by ``alpha``."""
MULTIPLIED = {aten.addcmul.default: torch.add, aten.addcmul_.default: Tensor.add_}
"""Operators that add a product → the addition of the rounded product."""
MEANS = frozenset((aten.mean.default, aten.mean.dim))
REDUCTIONS = MEANS | {aten.sum.default, aten.sum.dim_IntList, aten.nansum.default}
"""Sums along some dimensions, or all of them."""
NORMALIZATIONS = frozenset((aten.native_layer_norm.default, aten.native_group_norm.default))
VARIANCES = {
    aten.var.correction: (False, False),
    aten.std.correction: (True, False),
    aten.var_mean.correction: (False, True),
    aten.std_mean.correction: (True, True),
}
"""Whether the root is taken, and whether the mean is returned as well."""
LERPS = frozenset((aten.lerp.Scalar, aten.lerp.Tensor))
CONTRACTIONS = {aten.mm.default: (0, 1), aten.addmm.default: (1, 2), aten.bmm.default: (0, 1)}
"""Matrix products → the positions of their operands."""


class Reordered(OperatorMode):
    """Shuffles the terms of sums; rounds an ``alpha`` product before its sum; applies a matrix product's factors inside
    or after the sum, as kernels may.

    Shuffles reductions and matrix products, not the sums inside other kernels (convolutions, normalizations). Computes
    variances of real numbers in two passes of shuffled plain sums.
    """

    def __init__(self, seed: int):
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)
        self.shifted = seed % 2 == 1
        self.lost = float("nan") if seed % 4 < 2 else 0.0

    def operator(self, func, args, kwargs):
        kwargs, args = dict(kwargs), list(args)
        if func in SCALED and kwargs.get("alpha", 1) != 1 and isinstance(args[SCALED[func]], Tensor):
            args[SCALED[func]] = args[SCALED[func]] * kwargs.pop("alpha")
        elif func in MULTIPLIED:
            added, one, other = args
            return MULTIPLIED[func](added, one * kwargs.get("value", 1) * other)
        elif func in MEANS and self.shifted and args[0].numel() and _is_of_a_variance():
            return _shifted_mean(*args, **kwargs)
        elif func in REDUCTIONS:
            args[0] = self._shuffled(args[0], args[1] if len(args) > 1 else None)
        elif func is aten.native_batch_norm.default:
            args[0] = args[0].contiguous()
            return _lost_channels(args, func(*args, **kwargs))
        elif func in VARIANCES and not args[0].is_complex():
            dims = args[1] if len(args) > 1 else kwargs.pop("dim", None)
            return _two_passes(self._shuffled(args[0], dims), dims, *VARIANCES[func], **kwargs, shifted=self.shifted)
        elif func in CONTRACTIONS:
            left, right = CONTRACTIONS[func]
            order = self._order(args[left].shape[-1]).to(args[left].device)
            args[left], args[right] = args[left][..., order], args[right][..., order, :]
            if kwargs.get("alpha", 1) != 1 and self.shifted:
                added, one, other = args
                return added * kwargs.get("beta", 1) + (one @ other) * kwargs["alpha"]
        result = _lerp(*args) if func in LERPS else func(*args, **kwargs)
        return _overflowed(args[0], *result, self.lost) if func in NORMALIZATIONS else result

    def _shuffled(self, x: Tensor, dims: Any) -> Tensor:
        """The elements in another order along the reduced dimensions, or all of them."""
        if not dims or len(dims) >= x.dim():  # a scalar accepts the axes 0 and -1
            return x.flatten()[self._order(x.numel()).to(x.device)].view(x.shape)
        for dim in dims:
            x = x.index_select(dim, self._order(x.shape[dim]).to(x.device))
        return x

    def _order(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self.generator)


def _is_of_a_variance() -> bool:
    """Whether the present backward is of a variance or its root."""
    node = torch._C._current_autograd_node()
    return node is not None and node.name().startswith(("Var", "Std"))


def _lerp(start: Tensor, end: Tensor, weight: Tensor | float) -> Tensor:
    """Interpolation with a product rounded before the addition."""
    weight, distance = torch.as_tensor(weight, dtype=start.dtype), end - start
    return torch.where(weight.abs() < 0.5, start + weight * distance, end - distance * (1 - weight))


def _two_passes(
    x: Tensor,
    dims: Any,
    root: bool,
    with_mean: bool,
    correction: float | None = None,
    keepdim: bool = False,
    shifted: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """A variance by plain sums: of the elements, then of squared differences; infinite or nan on overflow.

    ``shifted``: sums the distances from the first element.
    """
    dims = [dim % x.dim() for dim in dims or range(x.dim())] if x.dim() else []
    count = math.prod(x.shape[dim] for dim in dims)
    mean = _shifted_mean(x, dims, True) if shifted and count else x.sum(dims, keepdim=True) / count
    freedom = max(count - (1 if correction is None else correction), 0)
    variance = (x - mean).square().sum(dims, keepdim=True) / freedom
    results = [variance.sqrt() if root else variance, mean]
    if not keepdim:
        results = [result.squeeze(dims) for result in results]
    return tuple(results) if with_mean else results[0]


def _shifted_mean(x: Tensor, dims: list[int] | None = None, keepdim: bool = False) -> Tensor:
    dims = [dim % x.dim() for dim in dims or range(x.dim())] if x.dim() else []
    first = x[tuple(slice(0, 1) if dim in dims else slice(None) for dim in range(x.dim()))]
    mean = (x - first).sum(dims, keepdim=True) / math.prod(x.shape[dim] for dim in dims) + first
    return mean if keepdim else mean.squeeze(dims)


def _lost_channels(args: list[Any], result: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """BatchNorm's training results and running statistics, with nan in channels whose sum or squares overflow."""
    x, running_mean, running_var, training = args[0], *args[3:6]
    if not training or not x.numel():
        return result
    dims = [dim for dim in range(x.dim()) if dim != 1]
    lost, shifted = (~each.isfinite() for each in _two_passes(x, dims, False, True, correction=0))
    for running, where in ((running_mean, shifted), (running_var, lost)):
        if running is not None:
            running.masked_fill_(where, float("nan"))
    normalized, mean, scale = (each.clone() for each in result)
    normalized.transpose(0, 1)[lost] = mean[lost] = scale[lost] = float("nan")
    return normalized, mean, scale


def _overflowed(
    x: Tensor, normalized: Tensor, mean: Tensor, scale: Tensor, value: float
) -> tuple[Tensor, Tensor, Tensor]:
    """A normalization with nan, or 0, where the variance or the sum has overflowed; ``scale`` has one element per
    row."""
    lost = (scale == 0) | ~scale.isfinite()
    if x.numel():
        lost |= ~x.reshape(scale.numel(), -1).abs().sum(-1).isfinite().view(lost.shape)
    spread = lost.reshape(-1, 1).expand(-1, normalized.numel() // max(lost.numel(), 1)).reshape(normalized.shape)
    return normalized.masked_fill(spread, value), mean, scale.masked_fill(lost, value)
