"""Absent grad_outs: a backward -> the backward of calls in which some outputs got no gradient.

Autograd leaves an output's gradient undefined where nothing was computed from the output, as from the logits where the
model returns a loss as well. Then nothing is computed from that gradient either: what is linear in it is absent, a sum
has a term less. It is not a gradient of zeros, which would meet infinities and NaN on its way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from autodiff.body import Binding, Body
from autodiff.clean import until_settled
from autodiff.constants import splat
from autodiff.extents import same_shape
from autodiff.ir import Expr, Function, Var, dtype, shape
from autodiff.ops import having
from autodiff.rewrite import BodyScope, Scope
from autodiff.views import deduplicate_views

__all__ = ["without_grad_outs"]


def without_grad_outs(backward: Function, absent: Collection[int], results: Sequence[int]) -> Function | None:
    """The function of the other parameters and of these results, in which nothing is computed from those parameters.

    Args:
        backward: linear in the parameters ``absent``, as a vector-Jacobian product is in its grad_outs.
        absent: places of parameters.
        results: places of results, in order.

    Returns:
        ``None`` where there is no rule for an operator, or where a result is computed from nothing else.
    """
    body = Body.of(backward)
    edited = body.tick()
    params = [body.binding(param) for param in body.params]
    gone = dict.fromkeys(params[place] for place in absent)
    scope = BodyScope(body)
    replaced: dict[Binding, Expr] = {}
    remaining = []
    for binding in body.bindings:
        body.substitute(binding, replaced)
        if gone.keys().isdisjoint(binding.reads):
            remaining.append(binding)
            continue
        left = _left(binding, gone, body, scope)
        if left is None:
            return None
        if left is _ABSENT:
            gone[binding] = None
        else:
            replaced[binding] = left
    body.outputs = [body.outputs[place] for place in results]
    if not gone.keys().isdisjoint(body.returned()):
        return None
    body.finish(remaining, replaced)
    for binding in reversed(gone):
        body.undefine(binding)
    body.params = [param.var for param in params if param not in gone]
    body.prune()
    until_settled(body, [deduplicate_views], edited)
    return body.function()


def _left(binding: Binding, gone: Collection[Binding], body: Body, scope: Scope) -> Expr | object | None:
    """What a call computes of operands some of which are gone; ``None``: there is no rule, or it has another type."""
    rule = _RULES.get(binding.op)
    if rule is None:
        return None
    left = rule(scope, *(_ABSENT if body.binding(arg) in gone else arg for arg in binding.value.args[:]))
    if left is None or left is _ABSENT:
        return left
    var = binding.var
    is_alike = isinstance(left, Var) and dtype(left) == dtype(var) and same_shape(shape(left), shape(var))
    return left if is_alike else None


_ABSENT = object()
"""In the place of an operand, or of a result."""

_Rule = Callable[..., Expr | object | None]
"""Operands of a call, some of them absent -> what it computes: another of its operands, or nothing.
Takes the scope of their definitions first."""


def _linear(scope: Scope, x: object, *rest: object) -> object | None:
    return _ABSENT if x is _ABSENT and all(each is not _ABSENT for each in rest) else None


def _bilinear(scope: Scope, x: object, y: object) -> object:
    return _ABSENT


def _sum(scope: Scope, x: object, y: object) -> object:
    return y if x is _ABSENT else x


def _difference(scope: Scope, x: object, y: object) -> object | None:
    return x if y is _ABSENT else None


def _choice(scope: Scope, condition: object, x: object, y: object) -> object | None:
    """The gradient of one arm of a choice: what the other one chose is zeros."""
    nothing = [each is _ABSENT or splat(each, scope) == 0 for each in (x, y)]
    return _ABSENT if condition is not _ABSENT and all(nothing) else None


_RULES: dict[str | None, _Rule] = {
    **dict.fromkeys([*having("view", "plain"), "relax.astype", "relax.negative", "relax.sum"], _linear),
    "relax.strided_slice": _linear,
    "relax.divide": _linear,
    "relax.multiply": _bilinear,
    "relax.matmul": _bilinear,
    "relax.add": _sum,
    "relax.subtract": _difference,
    "relax.where": _choice,
}
