"""The gradient of a scan: see :mod:`autodiff.scan.gradient`."""

from __future__ import annotations

from collections.abc import Collection

from autodiff.gradients.registry import Emit, checks, library_gradient
from autodiff.ir import Call, Expr, Var
from autodiff.scan.gradient import partials
from autodiff.scan.operator import NAME, read

__all__ = ["check_gradient", "scan"]


@library_gradient(NAME)
def scan(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
    """Backpropagation through time: a scan in the opposite order"""
    return [None, *partials(call, y, g, emit)]


@checks(NAME)
def check_gradient(call: Call, active: Collection[Var]) -> str | None:
    """A scan is given its gradient when it is made one for training."""
    options = call.args[1]
    return None if read(str(options.value)).gradient is not None else "the scan has no gradient"
