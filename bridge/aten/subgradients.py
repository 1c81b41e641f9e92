"""Subgradients: which of several derivatives this version of torch takes where there is a choice, by asking autograd.

torch 2.14 changed two of them. At a bound, the gradient of ``clamp`` was 1 and is 0; of two equal operands, ``fmax``
and ``fmin`` sent theirs to the first and now send half to each. What autograd answers here is what eager training does.
So is the kink of ``softshrink``, where some versions round the bound.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from bridge.base.devices import HOST
from bridge.base.modes import autocast_to

__all__ = ["clamp_at_bound", "fmax_prefers_first", "softshrink_rounds_its_bound"]

_NAN = float("nan")


def _gradients(function: Callable[..., torch.Tensor], *operands: list[float]) -> list[list[float]]:
    """Gradients of the sum of the result, in whatever mode this is called."""
    with torch.inference_mode(False), torch.enable_grad(), autocast_to(None):
        leaves = [torch.tensor(values, dtype=torch.float64, device=HOST, requires_grad=True) for values in operands]
        grads = torch.autograd.grad(function(*leaves).sum(), leaves)
    return [grad.tolist() for grad in grads]


@functools.cache
def clamp_at_bound() -> float | None:
    """Gradient of ``clamp`` at its bounds, 1.0 or 0.0; ``None`` if it depends on the bound."""
    (found,) = _gradients(lambda x: x.clamp(-1.0, 2.0), [-1.0, 2.0])
    return found[0] if found in ([0.0, 0.0], [1.0, 1.0]) else None


@functools.cache
def fmax_prefers_first() -> bool:
    """Whether ``fmax`` and ``fmin`` send all of a tie's gradient to the first operand, nan giving way to a number."""
    operands = [0.5, _NAN, 3.0, _NAN], [0.5, 1.0, _NAN, _NAN]
    expected = [[1.0, 0.0, 1.0, 1.0], [0.0, 1.0, 0.0, 0.0]]
    return all(_gradients(function, *operands) == expected for function in (torch.fmax, torch.fmin))


@functools.cache
def softshrink_rounds_its_bound() -> bool:
    """Whether ``softshrink`` on the CPU takes the bound in the half type of its input; a GPU's does."""
    with torch.inference_mode(False), torch.no_grad(), autocast_to(None):
        above = torch.tensor(0.1, dtype=torch.bfloat16, device=HOST)  # which holds 0.1001
        return torch.nn.functional.softshrink(above, 0.1).item() == 0
