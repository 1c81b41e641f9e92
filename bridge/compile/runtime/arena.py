"""Arena plan: lifetimes of intermediate values → byte offsets in one block, shared by values never alive together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bridge.compile.loop_ir.graph import Value

__all__ = ["ALIGNMENT", "ArenaPlan", "plan_arena"]

ALIGNMENT = 64  # a cache line, and the widest vector


@dataclass(frozen=True)
class ArenaPlan:
    """Byte offsets of values in a block of ``size`` bytes; offsets are multiples of 64."""

    offsets: Mapping[Value, int]
    size: int


def plan_arena(lifetimes: Mapping[Value, tuple[int, int]]) -> ArenaPlan:
    """Offsets for values alive from their first to their last step, both included.

    Largest first, each at the lowest offset that is free during its life: within a few per cent of the lower bound on
    training graphs, and deterministic.
    """
    placed: list[tuple[int, int, int, int]] = []  # begin, end, first, last
    offsets: dict[Value, int] = {}
    for value in sorted(lifetimes, key=lambda value: -value.nbytes):
        first, last = lifetimes[value]
        size = -(-value.nbytes // ALIGNMENT) * ALIGNMENT
        taken = sorted((begin, end) for begin, end, start, stop in placed if start <= last and first <= stop)
        offset = 0
        for begin, end in taken:
            if offset + size <= begin:
                break
            offset = max(offset, end)
        offsets[value] = offset
        placed.append((offset, offset + size, first, last))
    return ArenaPlan(offsets, max((end for _, end, _, _ in placed), default=0))
