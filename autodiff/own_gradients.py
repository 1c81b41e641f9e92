"""Own gradients: a joint body with tangents -> the same with the gradients that they stand for.

A function with a gradient of the user's own is ``library.custom_gradient(count, inputs.., gradients.., tangents..)``,
beside what computes the gradients from ``library.tangent`` values. Its rule says ``library.given(gradient_i,
tangents.., grads..)``: gradient i, where the tangents are these gradients. Each tangent is of one function and each
function is differentiated once, so that what depends on a tangent moves behind the gradient that takes its place.
"""

from __future__ import annotations

from autodiff.body import Binding, Body, on_functions
from autodiff.ir import Expr, library_name

__all__ = ["drop_gradients", "put_gradients"]

_CUSTOM, _GIVEN, _WITH = "library.custom_gradient", "library.given", "library.with_derivative"


def put_gradients(body: Body) -> None:
    """Every tangent becomes the gradient that was found for it; bindings are in an order in which that is defined."""
    found = [binding for binding in body.bindings if library_name(binding.value) == _GIVEN]
    if not found:
        return
    replaced: dict[Binding, Expr] = {}
    for binding in found:
        _, gradient, *pairs = binding.value.args
        half = len(pairs) // 2
        for tangent, grad in zip(pairs[:half], pairs[half:], strict=True):
            replaced[body.binding(tangent)] = grad
        replaced[binding] = gradient
    remaining = [binding for binding in body.bindings if binding not in replaced]
    resolved = {binding: _resolved(body, value, replaced) for binding, value in replaced.items()}
    for binding in remaining:
        body.substitute(binding, resolved)
    for binding in replaced:
        for read in binding.reads:
            read.users.pop(binding, None)
    body.finish(_in_order(remaining), resolved)
    body.prune()


@on_functions
def drop_gradients(body: Body) -> None:
    """Of a function that is not differentiated: without the gradients of the user's own, and what computes them.

    Safe: ``with_derivative(x, ..)`` is ``x``.
    """
    if not any(library_name(binding.value) == _CUSTOM for binding in body.bindings):
        return
    replaced: dict[Binding, Expr] = {}
    remaining = []
    for binding in body.bindings:
        body.substitute(binding, replaced)
        if library_name(binding.value) == _WITH:
            replaced[binding] = binding.value.args[1]
        else:
            remaining.append(binding)
    body.finish(remaining, replaced)
    body.prune()


def _resolved(body: Body, value: Expr, replaced: dict[Binding, Expr]) -> Expr:
    """What a value is replaced by in the end: the gradient of a function may be that of another's tangent."""
    while (binding := body.binding(value)) in replaced:
        value = replaced[binding]
    return value


def _in_order(bindings: list[Binding]) -> list[Binding]:
    """The bindings, each behind those that it reads, otherwise as they were."""
    waiting = {binding: None for binding in bindings}
    ordered: list[Binding] = []
    for first in bindings:
        stack = [first]
        while stack:
            binding = stack[-1]
            before = [read for read in binding.reads if read in waiting and read is not binding]
            if binding not in waiting:
                stack.pop()
            elif before:
                stack.extend(reversed(before))
            else:
                del waiting[binding]
                ordered.append(binding)
                stack.pop()
    return ordered
