"""The effect of rounding on a program: eager with a rounding error added to every operator's result.

A difference between two computations of one value is rounding if eager moves as far when each of its operators is off
by a unit in the last place; otherwise it is a bug. Unlike a fixed tolerance this follows the program's condition:
cancellation, sharp softmaxes, ties.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tests.operator_mode import OperatorMode

ULPS = 2.0
"""The relative error of a result, in units of its dtype."""


SUMS = frozenset(
    "sum mean nansum var std var_mean std_mean norm linalg_vector_norm mm bmm addmm baddbmm mv addmv dot vdot"
    " convolution cumsum trace logcumsumexp logsumexp native_layer_norm native_group_norm _softmax _log_softmax"
    " _embedding_bag _embedding_bag_forward_only".split()
)
"""Operators that sum: another order acts like rounded operands (visible in cancellation)."""


IN_PLACE = frozenset(
    "add_ sub_ mul_ div_ pow_ square_ sqrt_ rsqrt_ reciprocal_ exp_ exp2_ expm1_ log_ log1p_ log2_ log10_ sin_ cos_"
    " tan_ sinh_ cosh_ tanh_ asin_ acos_ atan_ asinh_ acosh_ atanh_ sigmoid_ erf_ erfc_ logit_ lerp_ addcmul_ addcdiv_"
    " silu_ mish_ elu_ celu_ gelu_ hardswish_ hardsigmoid_ cumsum_ cumprod_ index_add_ scatter_add_".split()
)
"""Operators that compute in place; others move elements, or are exact."""


SIGNS = (torch.ops.aten.copysign, torch.ops.aten.signbit)
"""Operators that read a sign: the sign of nan is up to processor and compiler, so the noise flips it."""


class Noise(OperatorMode):
    """Multiplies every newly computed float by ``1 + e``, ``|e| <= ULPS * eps``; masks and draws are left alone.

    The operands of sums are disturbed in the same way.

    Args:
        of_values: whether the error is a function of the number and the seed, so that equal numbers stay equal: ties
            that forward relies on (an index in range) keep eager's order.
    """

    def __init__(self, seed: int, *, of_values: bool = False):
        super().__init__()
        self.seed, self.of_values = seed, of_values
        self.generator = torch.Generator().manual_seed(seed)

    def operator(self, func, args, kwargs):
        if func.overloadpacket.__name__ in SUMS:
            args = pytree.tree_map_only(Tensor, self._disturbed, args)
        if func.overloadpacket is torch.ops.aten.bernoulli:
            args = pytree.tree_map_only(Tensor, lambda p: p.clamp(max=1), args)
        elif func.overloadpacket in SIGNS:
            args = pytree.tree_map_only(
                Tensor, lambda x: torch.where(x.isnan(), -x, x) if x.is_floating_point() else x, args
            )
        result = func(*args, **kwargs)
        if func.overloadpacket.__name__ in IN_PLACE:
            return result.copy_(self._disturbed(result))
        if torch.Tag.nondeterministic_seeded in func.tags or any(r.alias_info for r in func._schema.returns):
            return result
        if not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves((args, kwargs))):
            return result  # a constant is exact
        return pytree.tree_map_only(Tensor, self._disturbed, result)

    def _disturbed(self, value: Tensor) -> Tensor:
        if value.is_complex() and value.numel() and value.layout == torch.strided and value.device.type != "meta":
            ulps = ULPS * torch.finfo(value.dtype).eps  # relative to the absolute value: parts cancel
            draws = [self._errors(part) for part in (value.real, value.imag)]
            return torch.empty_like(value).copy_(value * torch.complex(1 + ulps * draws[0], ulps * draws[1]))
        if not value.is_floating_point() or not value.numel() or value.layout != torch.strided:
            return value
        if value.device.type == "meta":  # torch only asks for a shape
            return value
        factor = 1 + ULPS * torch.finfo(value.dtype).eps * self._errors(value)
        noisy = torch.empty_like(value)
        noisy.copy_(value.double() * factor)
        return torch.where(value.isfinite() & noisy.isfinite(), noisy, value)

    def _errors(self, value: Tensor) -> Tensor:
        if not self.of_values:
            return torch.rand(value.shape, generator=self.generator, dtype=torch.float64).to(value.device) * 2 - 1
        bits = value.double().contiguous().view(torch.int64) * MULTIPLIER + self.seed
        return ((bits ^ (bits >> 32)) * MULTIPLIER).double() / 2**63


MULTIPLIER = 0x5851F42D4C957F2D
"""Knuth's multiplier of a 64-bit linear congruential generator: nearby numbers get seemingly independent errors."""
