"""Masks that kernels compute: a parameter that is the generator's state in place of a mask → a point-wise node.

The mask of eager's fused dropouts follows from the generator's seed and offset (:mod:`bridge.compile.codegen.philox`).
A kernel that reads it computes it, forward and backward; it lies in memory only where a kernel that is not generated
reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autodiff.extents import Dim
from autodiff.library import GENERATOR_STATE
from bridge.compile.codegen.philox import threshold
from bridge.compile.loop_ir.graph import Operand, Scalar, Value, whole
from bridge.compile.loop_ir.views import View
from bridge.compile.translate.builder import Builder

__all__ = ["DrawnMask", "drawn_mask", "state_parameter"]


@dataclass(frozen=True)
class DrawnMask:
    """How eager draws a mask.

    Attributes:
        rate: the probability of a zero.
        width: how many elements a thread of its kernel loads at once, of :data:`philox.WIDTHS`.
        threads: of its launch; attention's mask does not depend on them.
    """

    rate: float
    width: int
    threads: Dim


def state_parameter(name: str) -> Value:
    """The generator's state, as a parameter: a caller has it on the host, a kernel finds it on its device."""
    return Value(name, *GENERATOR_STATE, "param")


def drawn_mask(builder: Builder, mask: DrawnMask, state: Value, extents: Sequence[Dim]) -> Operand:
    """The mask of a dense tensor of these extents, from the generator's state; made where it is first read."""
    every = (0,) * len(extents)
    seed, offset = (Operand(state, View(tuple(extents), every, place)) for place in range(2))
    index = whole(Value(f"{state.name}_index", tuple(extents), "int64", "index"))
    numbers = Scalar(mask.threads, "int64"), Scalar(threshold(mask.rate, mask.width), "int64")
    return builder.pointwise(f"dropout_mask_{mask.width}", [index, seed, offset, *numbers], "bool")
