"""Gradient of a scan: what its options say of it -> the bindings of its backward.

The options hold the backward of one step, which is the same for all lengths. The backward of the scan, a function of
its tensors, its results and the gradients of some of them, is made of it where it is wanted
(:mod:`autodiff.scan.reverse`), and its bindings are put in place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from autodiff.ir import Call, Expr, Function, TupleGetItem, Var, bindings, results, substitute
from autodiff.scan.hoist import hoist
from autodiff.scan.operator import Scan, body_text, parsed, scan_of
from autodiff.scan.reverse import BackwardParameter, BackwardStep, reverse_scan

__all__ = ["backward_of", "gradient_of", "partials"]


def gradient_of(step: BackwardStep, sums_later: bool) -> dict[str, Any]:
    """As the options of a scan hold it; ``sums_later``: see :mod:`autodiff.scan.reverse`.

    ``ValueError`` if TVM's JSON cannot hold a literal in it.
    """
    text = body_text(step.function)
    if text is None:
        raise ValueError(_UNWRITTEN)
    return {
        "step": text,
        "params": [list(saved) for saved in step.params],
        "wanted": list(step.wanted),
        "differentiated": list(step.differentiated),
        "after": [list(pair) for pair in step.after.items()],
        "sums_later": sums_later,
    }


def backward_of(scan: Scan) -> Function:
    """Tensors, results, and gradients of the results that have some, of a scan with a gradient → the gradients of the
    tensors that are wanted."""
    told = scan.gradient
    params = tuple(BackwardParameter(*each) for each in told["params"])
    after = {carry: y for carry, y in told["after"]}
    step = BackwardStep(parsed(told["step"]), params, tuple(told["wanted"]), tuple(told["differentiated"]), after)
    function = reverse_scan(dataclasses.replace(scan, gradient=None), step, told["sums_later"])
    if function is None:
        raise ValueError(_UNWRITTEN)
    return hoist(function)


def partials(call: Call, y: Var, g: Var, emit: Callable[[Expr], Var]) -> list[Expr | None]:
    """The gradients of the tensors of a scan's call that has a gradient, from its results and their gradients."""
    scan, tensors = scan_of(call)
    told, function = scan.gradient, backward_of(scan)
    made = [emit(TupleGetItem(y, place)) for place in range(len(y.ty.fields))]
    grads = [emit(TupleGetItem(g, place)) for place in told["differentiated"]]
    known: dict[Var, Expr] = dict(zip(function.params, (*tensors, *made, *grads), strict=True))
    for var, value in bindings(function):
        known[var] = emit(substitute(value, known))
    found = dict(zip(told["wanted"], (known[value] for value in results(function)), strict=True))
    return [found.get(place) for place in range(len(tensors))]


_UNWRITTEN = "a literal in the body of a loop cannot be written down"
