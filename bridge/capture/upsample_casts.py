"""Casts of interpolations: torch's formulas for them in Python → under autocast, of the element type that eager's have.

torch.export, and a fake run on symbolic sizes, compute an interpolation with scale factors by such a formula, past the
operator to whose argument a GPU's autocast gives float32. What reads the result would be traced for another type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial, wraps
from typing import Any

import torch

from bridge.base.torch_internals import has_kernel, replaced_formula
from bridge.capture.passes.preserved_ops import UPSAMPLES

__all__ = ["upsamples_cast"]


@contextmanager
def upsamples_cast() -> Iterator[None]:
    """While active, these formulas begin with autocast's cast."""
    with ExitStack() as stack:
        for packet in UPSAMPLES:
            stack.enter_context(replaced_formula(packet.vec, partial(_casting, packet.__name__)))
        yield


@cache
def _casting(name: str, formula: Callable) -> Callable:
    @wraps(formula)
    def cast(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return formula(x.float() if _is_cast(x, name) else x, *args, **kwargs)

    return cast


def _is_cast(x: torch.Tensor, name: str) -> bool:
    """Whether autocast gives the operator without scale factors float32."""
    kind = x.device.type
    if x.dtype not in (torch.float16, torch.bfloat16) or not torch.is_autocast_enabled(kind):
        return False
    return has_kernel(f"aten::{name}", f"Autocast{kind.upper()}")
