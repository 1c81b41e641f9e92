"""Choices: a program's differences from the default compilation, as (name, value) pairs → a backend of its own.

Limits and blocks of products change no bit. A reduction's order, a product's algorithm and a library call's variant
round differently, within the bounds of their kind: so choices are part of a backend's key, hence of every program's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from bridge.artifact import written
from bridge.compile.schedule.chain_plan import CallShape, LayoutClass, ProductShape
from bridge.compile.schedule.limits import Limits
from bridge.compile.schedule.order import ReductionOrder

__all__ = ["CALLS", "LIMITS", "NO_CHOICES", "ORDER", "PARTITION", "PRODUCTS", "Alternative", "Choices"]

LIMITS, ORDER, PRODUCTS, CALLS, PARTITION = "limits", "order", "products", "calls", "partition"
"""The parts of choices."""

Value = int | tuple[int, ...]
Name = str | ProductShape | CallShape

_NAMES = {LIMITS: frozenset(Limits.names()), ORDER: frozenset(field.name for field in fields(ReductionOrder))}


@dataclass(frozen=True)
class Alternative:
    """Candidate values of one tunable.

    Attributes:
        part: :data:`LIMITS` or :data:`ORDER`.
        name: of its field.
        values: in the order of the trials.
    """

    part: str
    name: str
    values: tuple[Value, ...]


@dataclass(frozen=True)
class Choices:
    """Differences from the default compilation; compared by value.

    Attributes:
        limits: ``(name, value)`` of :class:`~bridge.compile.schedule.limits.Limits`, in the order of the names.
        order: ``(name, value)`` of :class:`~bridge.compile.schedule.order.ReductionOrder`.
        products: ``(class of products, algorithm)``.
        calls: ``(class of library calls, variant)``.
        partition: the name of a partition strategy, or a budget for :class:`partition.MinCut`; ``None``: the default.

    Raises:
        ValueError: an unknown name.
    """

    limits: tuple[tuple[str, Value], ...] = ()
    order: tuple[tuple[str, Value], ...] = ()
    products: tuple[tuple[ProductShape, str], ...] = ()
    calls: tuple[tuple[CallShape, str], ...] = ()
    partition: str | float | None = None

    def __post_init__(self) -> None:
        for part, known in _NAMES.items():
            for name, _ in getattr(self, part):
                if name not in known:
                    raise ValueError(f"{part}: there is no {name!r}")

    def __bool__(self) -> bool:
        return self != NO_CHOICES

    def having(self, part: str, name: Name, value: Value | str) -> Choices:
        """These choices with one value set."""
        if part == PARTITION:
            return replace(self, partition=value)
        return replace(self, **{part: tuple(sorted({**dict(getattr(self, part)), name: value}.items(), key=_by_name))})

    def without(self, part: str, name: Name) -> Choices:
        """These choices with the default in one place."""
        if part == PARTITION:
            return replace(self, partition=None)
        return replace(self, **{part: tuple(pair for pair in getattr(self, part) if pair[0] != name)})

    def words(self, limits: Limits, order: ReductionOrder) -> Iterator[str]:
        """A line for each choice; ``limits``, ``order``: the defaults."""
        for part, default in ((LIMITS, limits.numbers), (ORDER, vars(order))):
            for name, value in getattr(self, part):
                yield f"{part}.{name} {default[name]} -> {value}"
        for product, way in self.products:
            yield f"product {product}: {way}"
        for call, form in self.calls:
            yield f"{call}: {form}"
        if self.partition is not None:
            yield f"partition: {self.partition if isinstance(self.partition, str) else f'budget {self.partition}'}"


written(CallShape, Choices, LayoutClass, ProductShape)


def _by_name(pair: tuple[Any, Any]) -> str:
    return repr(pair[0])


NO_CHOICES = Choices()
"""Everything by default."""
