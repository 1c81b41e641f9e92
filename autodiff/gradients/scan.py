"""The gradient of a scan: see :mod:`autodiff.scan.reverse`."""

from __future__ import annotations

from collections.abc import Collection

from autodiff.gradients.registry import Emit, checks, library_gradient
from autodiff.ir import Call, Expr, Var, is_float
from autodiff.scan.operator import NAME, scan_of
from autodiff.scan.reverse import partials

__all__ = ["check_gradient", "scan"]


@library_gradient(NAME)
def scan(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
    """Backpropagation through time: a scan in the opposite order"""
    found = partials(call, y, g, emit)
    return [*[None] * (len(call.args) - len(found)), *found]


@checks(NAME)
def check_gradient(call: Call, active: Collection[Var]) -> str | None:
    """A scan's gradient is attached when the scan is built for training; it must cover every active float tensor."""
    scan, tensors = scan_of(call)
    if scan.gradient is None:
        return "the scan has no gradient"
    wanted = [*scan.gradient["wanted"], *scan.gradient["zero"]]
    missing = [place for place, tensor in enumerate(tensors) if tensor in active and is_float(tensor)]
    missing = [place for place in missing if place not in wanted]
    return f"the scan has no gradient with respect to its tensors {missing}" if missing else None
