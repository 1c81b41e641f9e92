"""Gradient of a scan: what its options say of it -> the bindings of its backward.

It is a function of the scan's tensors, its results and the gradients of some of them, see
:mod:`autodiff.scan.reverse`, written down when the scan is made one for training: the rule puts its bindings in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tvm

from autodiff.ir import Call, Expr, Function, TupleGetItem, Var, bindings, results, substitute
from autodiff.scan.operator import parsed, scan_of

__all__ = ["gradient_of", "partials"]


def gradient_of(function: Function, wanted: Sequence[int], differentiated: Sequence[int]) -> dict[str, Any]:
    """As the options of a scan hold it: the tensors whose gradients it gives, and the results whose gradients it takes,
    by number."""
    text = tvm.ir.save_json(function)
    return {"function": text, "wanted": list(wanted), "differentiated": list(differentiated)}


def partials(call: Call, y: Var, g: Var, emit: Callable[[Expr], Var]) -> list[Expr | None]:
    """The gradients of the tensors of a scan's call that has a gradient, from its results and their gradients."""
    scan, tensors = scan_of(call)
    told = scan.gradient
    function = parsed(told["function"])
    made = [emit(TupleGetItem(y, place)) for place in range(len(y.ty.fields))]
    grads = [emit(TupleGetItem(g, place)) for place in told["differentiated"]]
    known: dict[Var, Expr] = dict(zip(function.params, (*tensors, *made, *grads), strict=True))
    for var, value in bindings(function):
        known[var] = emit(substitute(value, known))
    found = dict(zip(told["wanted"], (known[value] for value in results(function)), strict=True))
    return [found.get(place) for place in range(len(tensors))]
