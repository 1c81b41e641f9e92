"""Samples of gradient rules: an operator's name -> small calls of it, each with the same function in torch.

``sample(name, build, reference, *args)`` adds one; :mod:`tests.autodiff.test_gradient_rules` runs them all, and fails
for a registered rule that has none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from tvm.relax import op

from tests.autodiff.gradcheck import draw

__all__ = ["KINKS", "SAMPLES", "Sample", "integers", "sample", "stops"]

#: Zero, both signs, and numbers around the kinks of the piecewise functions.
KINKS = torch.tensor([-7.0, -3.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 3.0, 6.0, 7.5], dtype=torch.float64)


@dataclass(frozen=True)
class Sample:
    """``build(scope, *params)`` in Relax and ``reference(*args)`` in torch; every float argument is differentiated.

    ``compiled``: TVM runs it, because the reference interpreter lacks a variant that the sample is about. ``rtol`` is
    larger than rounding in float64 only for a kernel that knows float32 alone.
    """

    build: Callable
    reference: Callable
    args: tuple[torch.Tensor, ...]
    compiled: bool = False
    rtol: float = 1e-10


SAMPLES: dict[str, list[Sample]] = {}


def sample(name: str, build: Callable, reference: Callable, *args: torch.Tensor, **options) -> None:
    """Adds a sample of the rule of ``"relax.<op>"`` or ``"library.<function>"``."""
    SAMPLES.setdefault(name, []).append(Sample(build, reference, args, **options))


def stops(name: str, ours: Callable, theirs: Callable, *args: torch.Tensor) -> None:
    """Adds a sample of a rule through which no gradient flows, beside a path through which one does.

    ``ours(scope, *params)`` in Relax, ``theirs(*args)`` in torch.
    """

    def build(scope, first, *rest):
        stopped = scope.emit(op.astype(scope.emit(ours(scope, first, *rest)), "float64"))
        return op.add(stopped, scope.emit(op.sum(scope.emit(op.multiply(first, first)))))

    def reference(first, *rest):
        return theirs(first, *rest).detach().double() + (first * first).sum()

    sample(name, build, reference, *args)


def integers(*extents: int, below: int, seed: int = 0) -> torch.Tensor:
    """Uniform int64 numbers from zero on."""
    return torch.randint(below, extents, generator=torch.Generator().manual_seed(seed))


def bools(*extents: int, seed: int = 0) -> torch.Tensor:
    """Coin tosses."""
    return draw(*extents, seed=seed) > 0
