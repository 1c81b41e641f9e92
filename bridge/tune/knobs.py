"""Knobs of a call: what of its compilation can be chosen, in the order in which it is tried.

Products come first, the largest ahead: they take most of a step. Then the backend's numbers, then the partition.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bridge.compile import PARTITION, PRODUCTS, Backend, CompileOptions, ProductShape, products_of
from bridge.dispatch import Entry
from bridge.lowering import DEFAULT_PARTITION
from bridge.tune.search import Knob

__all__ = ["knobs_of"]

_MOST_PRODUCTS = 12
"""Classes of products that are tried in a call."""

_BUDGETS = (0.75, 0.5, 0.25)
"""Of captures, as parts of what saving everything would take."""


def knobs_of(entry: Entry, partition: Any) -> list[Knob]:
    """The knobs of an entry that was compiled by default, with the strategy that the user asks for."""
    backend = entry.backend
    knobs = [Knob(PRODUCTS, product, backend.other_ways(product)) for product in _products(entry, backend)]
    knobs += [Knob(each.part, each.name, each.values) for each in backend.alternatives]
    if entry.plan is not None and partition == DEFAULT_PARTITION:
        knobs.append(Knob(PARTITION, None, ("save_all", "recompute_all", *_BUDGETS)))
    return knobs


def _products(entry: Entry, backend: Backend) -> Sequence[ProductShape]:
    """Classes of the products of forward and backward, the largest first."""
    options = CompileOptions.current(backend)
    functions = [entry.programs.forward_function]
    if entry.backward is not None:
        functions.append(entry.lowered.expected_backward)
    found = {product: way for function in functions for product, way in products_of(function, options)}
    ordered = sorted(found, key=lambda product: (-product.multiplications, str(product)))
    return ordered[:_MOST_PRODUCTS]
