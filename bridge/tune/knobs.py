"""Knobs of a call: what of its compilation can be chosen, in the order in which it is tried.

Products come first, the largest ahead: they take most of a step. Then the backend's numbers, then the partition.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple
from typing import Any

from bridge.compile import PARTITION, PRODUCTS, Backend, CompileOptions, ProductShape, products_of
from bridge.dispatch import Entry
from bridge.lowering import DEFAULT_PARTITION
from bridge.tune.log import TuningLog
from bridge.tune.search import Knob

__all__ = ["knobs_of"]

WAYS = "ways"

_MOST_PRODUCTS = 12
"""Classes of products that are tried in a call."""

_MOST_WAYS = 3
"""Of one class, beside the present one."""

_ABOUT_AS_FAST = 1.1
"""Times the present way's seconds, measured by itself, up to which another one may be better in the whole step."""

_BUDGETS = (0.75, 0.5, 0.25)
"""Of captures, as parts of what saving everything would take."""


def knobs_of(entry: Entry, partition: Any, log: TuningLog) -> list[Knob]:
    """The knobs of an entry that was compiled by default, with the strategy that the user asks for.

    ``log``: has the seconds of products' ways, or is given them.
    """
    backend = entry.backend
    knobs = list(_products(entry, backend, log))
    knobs += [Knob(each.part, each.name, each.values) for each in backend.alternatives]
    if entry.plan is not None and partition == DEFAULT_PARTITION:
        knobs.append(Knob(PARTITION, None, ("save_all", "recompute_all", *_BUDGETS)))
    return knobs


def _products(entry: Entry, backend: Backend, log: TuningLog) -> Iterator[Knob]:
    """Of the products of forward and backward, the largest first, those that have another promising way."""
    options = CompileOptions.current(backend)
    functions = [entry.programs.forward_function]
    if entry.backward is not None:
        functions.append(entry.lowered.expected_backward)
    found = {product: way for function in functions for product, way in products_of(function, options)}
    ordered = sorted(found, key=lambda product: (-product.multiplications, str(product)))
    for product in ordered[:_MOST_PRODUCTS]:
        present, seconds = _measured(product, found[product], backend, log)
        limit = _ABOUT_AS_FAST * seconds.get(present, 0.0)
        ways = [way for way in sorted(seconds, key=seconds.__getitem__) if way != present and seconds[way] <= limit]
        if ways:
            yield Knob(PRODUCTS, product, tuple(ways[:_MOST_WAYS]))


def _measured(product: ProductShape, present: str, backend: Backend, log: TuningLog) -> tuple[str, dict[str, float]]:
    """The present way of a product and the seconds of all ways, from the log where it has them."""
    named = repr(astuple(product))
    for record in log.records:
        if record.get("kind") == WAYS and record.get("product") == named and isinstance(record.get("seconds"), dict):
            return str(record.get("present")), record["seconds"]
    record = log.append(kind=WAYS, product=named, present=present, seconds=dict(backend.seconds_of_ways(product)))
    return present, record["seconds"]
