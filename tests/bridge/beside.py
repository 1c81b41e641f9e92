"""A training step of an eager and of a dispatched module → asserts that all results are equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from bridge import add_tvm_dispatch, stats


def double(seed: int, *shape: int, requires_grad: bool = False) -> torch.Tensor:
    """Normal numbers in float64, from a separate generator."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return made.requires_grad_(requires_grad)


def beside(
    make: Callable[[], tuple[nn.Module, Any]],
    step: Callable[[nn.Module, Any, int], Any],
    sample: Callable[[nn.Module, Any], tuple] | None,
    steps: int = 3,
    hits: int | None = None,
    **options: Any,
) -> nn.Module:
    """Compares ``step(module, own, i)`` of an eager module with that of a dispatched one, for each ``i``.

    Args:
        make: returns the module and the loop's other state.
        sample: returns the dispatch's sample from both; ``None``: without a sample.
        step: returns tensors and plain values, all of which must be equal.
        hits: at least; all steps but a first call without a sample, unless given.

    Returns:
        the dispatched module.
    """

    def made() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        return make()

    def told(module: nn.Module, own: Any, i: int) -> list[Any]:
        torch.manual_seed(100 + i)
        result = [*pytree.tree_leaves(step(module, own, i)), torch.get_rng_state()]
        result += [each.grad for each in module.parameters()]
        leaves = [each.detach().clone() if isinstance(each, torch.Tensor) else each for each in result]
        for each in module.parameters():
            each.grad = None
        return leaves

    eager, dispatched = made(), made()
    add_tvm_dispatch(dispatched[0], *([] if sample is None else [sample(*dispatched)]), **options)
    for i in range(steps):
        wanted, got = told(*eager, i), told(*dispatched, i)
        assert len(wanted) == len(got)
        for a, b in zip(wanted, got, strict=True):
            if isinstance(a, torch.Tensor):
                torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-12)
            else:
                assert a == b
    least = steps - (sample is None) if hits is None else hits
    assert stats(dispatched[0]).hits >= least, dict(stats(dispatched[0]).misses)
    return dispatched[0]
