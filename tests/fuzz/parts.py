"""Eager with real factors of complex numbers applied part by part.

torch makes a real factor complex, and multiplies by ``alpha`` of a sum even where it is 1: where one part is infinite,
``inf * 0`` makes nan of the other (``docs/limits.md``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.operator_mode import OperatorMode

aten = torch.ops.aten

SUMS = {
    aten.add.Tensor: 1,
    aten.add.Scalar: 1,
    aten.add_.Tensor: 1,
    aten.sub.Tensor: -1,
    aten.sub.Scalar: -1,
    aten.sub_.Tensor: -1,
}
"""Sums and differences → the sign of the second operand."""
PRODUCTS = (aten.mul.Tensor, aten.mul.Scalar, aten.mul_.Tensor)
QUOTIENTS = (aten.div.Tensor, aten.div.Scalar, aten.div_.Tensor)
MEANS = (aten.mean.default, aten.mean.dim)
"""Operators that divide by a count."""
SIGN = aten.sgn.default
"""Divides by the absolute value: torch's kernel makes it complex for a few elements and for a remainder of many."""


class PartByPart(OperatorMode):
    """Applies an operation with a real number to each part of a complex one."""

    def operator(self, func, args, kwargs):
        made = _made(func, args, kwargs)  # from the values before an in-place write
        result = func(*args, **kwargs)
        if made is None or not _is_complex(result) or result.is_conj() or result.is_neg():
            return result
        return result.copy_(torch.complex(*(part.to(result.real).expand(result.shape) for part in made)))


def _made(func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    if func in SUMS and not isinstance(alpha := kwargs.get("alpha", 1), complex):
        (a, b), (c, d) = map(_parts, args[:2])
        factor = SUMS[func] * alpha
        return a + factor * c, b + factor * d
    if func in MEANS and _is_complex(args[0]):
        return tuple(func(part, *args[1:], **kwargs) for part in _parts(args[0]))
    if func is SIGN and _is_complex(args[0]):
        size = args[0].abs()
        return tuple(torch.where(size == 0, 0, part / size) for part in _parts(args[0]))
    if func not in (*PRODUCTS, *QUOTIENTS) or all(map(_is_complex, args[:2])):
        return None
    if func in QUOTIENTS:
        return None if _is_complex(args[1]) else tuple(part / args[1] for part in _parts(args[0]))
    whole, factor = args[:2] if _is_complex(args[0]) else reversed(args[:2])
    return tuple(part * factor for part in _parts(whole))


def _is_complex(value: Any) -> bool:
    return value.is_complex() if isinstance(value, Tensor) else isinstance(value, complex)


def _parts(value: Any) -> tuple[Tensor, Tensor]:
    value = value if isinstance(value, Tensor) else torch.tensor(value)
    return (value.real, value.imag) if value.is_complex() else (value, torch.zeros_like(value))
