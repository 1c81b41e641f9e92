"""Binding-time analysis: a body and the number of its frozen parameters -> the bindings that depend on those alone."""

from __future__ import annotations

from autodiff.body import Binding, Body
from autodiff.ops import traits
from autodiff.typed import reads_extents

__all__ = ["hoist_static", "static_bindings"]


def static_bindings(body: Body, frozen: int) -> set[Binding]:
    """The first ``frozen`` parameters, and the bindings that read nothing but static ones (or nothing at all).

    Not static is what has a symbolic extent, which a call decides, and what draws.
    """
    found = set(body.parameters()[:frozen])
    for binding in body.bindings:
        if all(read in found for read in binding.reads) and not _varies(binding):
            found.add(binding)
    return found


def hoist_static(body: Body, frozen: int) -> set[Binding]:
    """Moves the static bindings to the front, each group in its order; returns them with the frozen parameters.

    Safe: static bindings read none of the others.
    """
    found = static_bindings(body, frozen)
    ordered = sorted(body.bindings, key=lambda binding: binding not in found)
    if ordered != body.bindings:
        body.bindings = ordered
        body.edits += 1
    return found


def _varies(binding: Binding) -> bool:
    return "random" in traits(binding.op or "") or reads_extents(binding.var) or reads_extents(binding.value)
