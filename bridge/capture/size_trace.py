"""Trace for all sizes: a call on fake tensors whose sizes are symbols → what it did, to compare with other calls.

Forward runs once, as in :mod:`bridge.capture.fake_run`, with a fresh symbol of torch's for each dimension that varies.
The operators are written down with expressions of the symbols for sizes, and whatever Python or torch asked about sizes
is a condition in torch's environment. So for sizes for which the conditions hold, forward runs these very operators;
two calls of equal traces are one function of their inputs there. That the conditions hold wherever a captured call
serves is :func:`is_implied`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from bridge.base.torch_internals import pytree
from bridge.base.torch_shapes import conclusions, expression, fresh_sizes
from bridge.capture.captured import Captured
from bridge.capture.dynamic_shapes import DynamicDim
from bridge.capture.fake_run import fake_run
from bridge.capture.observation import Observation
from bridge.capture.symbolic_sizes import SymbolicSizes
from bridge.capture.sympy_extents import NotTranslatedError, holds
from bridge.state import module_tensors

__all__ = ["SizeTrace", "is_implied", "sized_run"]


@dataclass(frozen=True)
class SizeTrace:
    """What a run concluded about sizes.

    Attributes:
        conditions: torch's expressions, in order.
        symbols: in ``conditions``, of the dimensions that vary; with the tensor's leaf and the dimension of each.
    """

    conditions: tuple[Any, ...]
    symbols: tuple[tuple[Any, int, int], ...]


def sized_run(
    module: nn.Module, args: tuple, kwargs: dict[str, Any], dims: Sequence[DynamicDim]
) -> tuple[Observation, SizeTrace]:
    """What ``module(*args, **kwargs)`` does, on fake tensors whose dimensions ``dims`` have symbols for sizes."""
    leaves = pytree.tree_leaves((args, kwargs))
    varying: dict[int, list[int]] = {}
    for each in dims:
        varying.setdefault(each.leaf, []).append(each.dimension)
    values = fresh_sizes({leaf: (leaves[leaf], places) for leaf, places in varying.items()})
    sizes = SymbolicSizes(dims, values)
    symbols = tuple((expression(values[d.leaf].shape[d.dimension], original=True), d.leaf, d.dimension) for d in dims)
    run = fake_run(module, *module_tensors(module), args, kwargs, sizes)
    return run.observation, SizeTrace(tuple(expr for expr, _ in conclusions(sizes.environment)), symbols)


def is_implied(trace: SizeTrace, captured: Captured) -> bool:
    """Whether the conditions hold for all sizes that a captured call serves; asking guards nothing."""
    scope = captured.extents
    if scope is None:
        return False
    places = [leaf for leaf, is_tensor in enumerate(captured.argument_is_tensor) if is_tensor]
    extents = {
        symbol: captured.argument_shapes[places.index(leaf)][dimension] for symbol, leaf, dimension in trace.symbols
    }
    samples = {symbol.name: sample for symbol, sample in scope.samples.items()}
    known = set(scope.guards)
    with scope.assuming(samples) as asked:
        try:
            hold = all(holds(condition, extents) for condition in trace.conditions)
        except NotTranslatedError:
            return False
    return hold and asked.keys() <= known
