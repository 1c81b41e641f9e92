"""Justified differences of the special-point sweep: operator and difference → a one-line reason, or nothing.

:mod:`.run` finds differences within eager itself (vectorized beside scalar code) and roundings; this table lists
intended differences, each with its points.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import torch

from tests.sweep.special.run import Difference


def _size(difference: Difference) -> float:
    """The largest finite magnitude among the inputs."""
    return max((abs(x) for row in difference.inputs for x in row if math.isfinite(x)), default=0.0)


def _overflows(dtype: torch.dtype, factor: float) -> Callable[[Difference], bool]:
    return lambda difference: factor * _size(difference) > torch.finfo(dtype).max


def _squares_overflow(dtype: torch.dtype) -> Callable[[Difference], bool]:
    return lambda difference: 4 * _size(difference) ** 2 > torch.finfo(dtype).max


def _tiny(dtype: torch.dtype) -> Callable[[Difference], bool]:
    info = torch.finfo(dtype)
    return lambda d: any(0 < abs(x) < info.smallest_normal / info.eps for row in d.inputs for x in row)


def _gradient(difference: Difference) -> bool:
    return difference.part.startswith("gradient")


def _value(difference: Difference) -> bool:
    return difference.part.startswith("value")


#: Operators, whether value or gradient, the points, and the reason.
_RULES = (
    (
        r"^(square|pow_2|pow_3|mse|float_power|rms.*|lp_pool1d)$",
        _gradient,
        _squares_overflow,
        "torch's factor 2 x (3 x^2) overflows before it meets a small upstream gradient; ours is g 2 x",
    ),
    (
        r"^addcmul$",
        _value,
        lambda dtype: lambda difference: _squares_overflow(dtype)(difference) or _tiny(dtype)(difference),
        "torch's vector code fuses product and sum: the product itself may be beyond the largest number",
    ),
    (
        r"^(add_alpha|sub_alpha|lerp.*)$",
        _value,
        lambda dtype: lambda difference: _overflows(dtype, 2)(difference) or _tiny(dtype)(difference),
        "torch's vector code fuses product and sum, without overflow and underflow in between",
    ),
    (
        r"^logsumexp$",
        _gradient,
        _squares_overflow,
        "exp(x - result) loses the logarithm of the count in rounding; ours is the exact share",
    ),
    (
        r"^(std|var)_all$",
        _value,
        lambda dtype: _overflows(dtype, 4),
        "torch sums a whole tensor in its own type, and along axes in float64, as we do",
    ),
    (
        r"^(std|var)",
        _gradient,
        lambda dtype: _overflows(dtype, 4),
        "torch takes the mean of its gradient formula in the tensor's own type, where its sum overflows",
    ),
    (
        r"^(layer_norm|group_norm)",
        lambda difference: True,
        _squares_overflow,
        "where squares overflow torch gives 0 or nan, as the row's length (4, 8, 17) has it",
    ),
    (
        r"^(batch_norm|instance_norm)",
        lambda difference: True,
        _squares_overflow,
        "torch's batch sums are in float64, and it scales before it subtracts the mean",
    ),
    (
        r"^layer_norm_eps_0$",
        lambda difference: True,
        lambda dtype: lambda d: _tiny(dtype)(d) or _size(d) ** 2 < torch.finfo(dtype).smallest_normal,
        "without epsilon, numbers whose squares are subnormal: what is left of them is rounding",
    ),
    (
        r"^(mse_mean|cosine_similarity)$",
        _gradient,
        _tiny,
        "a product with a subnormal number rounds to zero, or not, in another order of factors",
    ),
    (
        r"^cosine_similarity$",
        lambda d: _gradient(d) and all(abs(a - b) < 1e-6 for a, b in zip(d.eager, d.ours, strict=True)),
        lambda dtype: lambda difference: True,
        "two terms cancel: what is left is their rounding",
    ),
    (
        r"^logit_eps",
        lambda d: _gradient(d) and math.isnan(d.inputs[0][0]),
        lambda dtype: lambda difference: True,
        "torch's vector code drops the gradient at nan, its scalar code has nan",
    ),
)


def excuse(name: str, dtype: torch.dtype) -> Callable[[Difference], str | None]:
    """The justification of an operator's differences: a difference → its reason, or ``None``."""
    rules = [(part, where(dtype), words) for pattern, part, where, words in _RULES if re.search(pattern, name)]

    def answer(difference: Difference) -> str | None:
        return next((words for part, where, words in rules if part(difference) and where(difference)), None)

    return answer
