"""Knobs of a call: what of its compilation can be chosen, in the order in which it is tried.

Convolutions and products come first, the largest ahead: they take most of a step. Then the backend's numbers, then the
partition.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple
from typing import Any

from bridge.compile import (
    CALLS,
    PARTITION,
    PRODUCTS,
    Backend,
    CallShape,
    CompileOptions,
    ProductShape,
    products_and_calls,
)
from bridge.dispatch import Entry
from bridge.lowering import DEFAULT_PARTITION
from bridge.tune.log import TuningLog
from bridge.tune.search import Knob

__all__ = ["knobs_of"]

WAYS, FORMS = "ways", "forms"

_MOST_PRODUCTS, _MOST_CALLS = 12, 12
"""Classes of products, and of library calls, that are tried in a call."""

_MOST_WAYS = 3
"""Of one class, beside the present one."""

_ABOUT_AS_FAST = 1.1
"""Times the present way's seconds, measured by itself, up to which another one may be better in the whole step."""

_BUDGETS = (0.75, 0.5, 0.25)
"""Of captures, as parts of what saving everything would take."""


def knobs_of(entry: Entry, partition: Any, log: TuningLog) -> list[Knob]:
    """The knobs of an entry that was compiled by default, with the strategy that the user asks for.

    ``log``: has the seconds of products' ways and of calls' forms, or is given them.
    """
    backend = entry.backend
    products, calls = _chosen(entry, backend)
    knobs = [*_calls(calls, backend, log), *_products(products, backend, log)]
    knobs += [Knob(each.part, each.name, each.values) for each in backend.alternatives]
    if entry.plan is not None and partition == DEFAULT_PARTITION:
        knobs.append(Knob(PARTITION, None, ("save_all", "recompute_all", *_BUDGETS)))
    return knobs


def _chosen(entry: Entry, backend: Backend) -> tuple[dict[ProductShape, str], list[CallShape]]:
    """The products of forward and backward, with their ways, and the library calls that have several forms."""
    options = CompileOptions.current(backend)
    functions = [entry.programs.forward_function]
    if entry.backward is not None:
        functions.append(entry.lowered.expected_backward)
    found = [products_and_calls(function, options) for function in functions]
    calls = dict.fromkeys(call for _, each in found for call in each)
    return {product: way for each, _ in found for product, way in each}, list(calls)


def _calls(calls: Iterable[CallShape], backend: Backend, log: TuningLog) -> Iterator[Knob]:
    """Those that take longest first, of the ones that have another promising form."""
    times = {call: _seconds_of_forms(call, backend, log) for call in calls}
    ordered = sorted((call for call in times if times[call]), key=lambda call: (-times[call][call.name], str(call)))
    for call in ordered[:_MOST_CALLS]:
        forms = _promising(call.name, times[call])
        if forms:
            yield Knob(CALLS, call, forms)


def _products(found: Mapping[ProductShape, str], backend: Backend, log: TuningLog) -> Iterator[Knob]:
    """The largest first, of those that have another promising way."""
    ordered = sorted(found, key=lambda product: (-product.multiplications, str(product)))
    for product in ordered[:_MOST_PRODUCTS]:
        present, seconds = _measured(product, found[product], backend, log)
        if ways := _promising(present, seconds):
            yield Knob(PRODUCTS, product, ways)


def _promising(present: str, seconds: Mapping[str, float]) -> tuple[str, ...]:
    """The fastest, of those that are about as fast as the present one by themselves."""
    limit = _ABOUT_AS_FAST * seconds.get(present, 0.0)
    ways = [way for way in sorted(seconds, key=seconds.__getitem__) if way != present and seconds[way] <= limit]
    return tuple(ways[:_MOST_WAYS])


def _measured(product: ProductShape, present: str, backend: Backend, log: TuningLog) -> tuple[str, dict[str, float]]:
    """The present way of a product and the seconds of all ways, from the log where it has them."""
    named = repr(astuple(product))
    for record in log.records:
        if record.get("kind") == WAYS and record.get("product") == named and isinstance(record.get("seconds"), dict):
            return str(record.get("present")), record["seconds"]
    record = log.append(kind=WAYS, product=named, present=present, seconds=dict(backend.seconds_of_ways(product)))
    return present, record["seconds"]


def _seconds_of_forms(call: CallShape, backend: Backend, log: TuningLog) -> dict[str, float]:
    """The seconds of a call's forms, from the log where it has them."""
    named = repr(astuple(call))
    for record in log.records:
        if record.get("kind") == FORMS and record.get("call") == named and isinstance(record.get("seconds"), dict):
            return record["seconds"]
    return log.append(kind=FORMS, call=named, seconds=dict(backend.seconds_of_forms(call)))["seconds"]
