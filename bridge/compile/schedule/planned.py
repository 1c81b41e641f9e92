"""A planned launch: which plan, on which tensors, with which integers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from autodiff.extents import Dim
from bridge.compile.loop_ir.graph import Value

__all__ = ["Planned"]

Plan = TypeVar("Plan")


@dataclass(frozen=True, eq=False)
class Planned(Generic[Plan]):
    """One launch of a plan: tensors in the order of the kernel's parameters, the integers behind them.

    ``scratch``: partial results of column reductions; ``ops``: the operators, in order.
    """

    plan: Plan
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    scratch: tuple[Value, ...]
    scalars: tuple[Dim, ...]
    ops: tuple[str, ...]
