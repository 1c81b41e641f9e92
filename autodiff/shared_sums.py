"""Shared sums: a sum of products with a factor that it does not sum over -> a sum that is there already, times that.

The gradient of a batch normalization adds up ``dy`` and ``dy * xhat`` for its bias and weight, and both times the
weight, which is one number for each channel, for its input: four sums over a large tensor, of which two are enough.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict

from tvm.relax import op

from autodiff.body import Binding, Body, on_functions
from autodiff.constants import size
from autodiff.extents import same
from autodiff.ir import Constant, Expr, TensorType, Var, dtype, shape
from autodiff.rewrite import BodyScope

__all__ = ["share_sums"]

_SUMS = ("relax.sum", "relax.mean")
_MOST_FACTORS = 8

Factors = Counter[Binding | str]
"""Of a product: bindings that are no products, and numbers as they are written."""


@on_functions
def share_sums(body: Body) -> None:
    """``sum(a * v)`` becomes ``sum(a) * v``, where that sum stands before it and ``v`` has no extent along its axes; a
    mean likewise. Of gradients only: who scales a sum in forward may do so because without it it would overflow.

    Safe: the same number but for rounding, which is that of one product, not of one for each element.
    """
    known: dict[tuple, list[tuple[Factors, Binding]]] = defaultdict(list)
    scope = BodyScope(body)
    changed = False
    gradients = {param for param in body.parameters() if param.name.startswith("grad_out_")}
    for binding in body.bindings:
        if not gradients.isdisjoint(binding.reads):
            gradients.add(binding)
        factors = _summed(binding, body) if binding.op in _SUMS else None
        if factors is not None:
            x, axes = binding.value.args[0], _axes(binding)
            key = tuple(axes), tuple(map(str, shape(x)))
            less = (each for each in known[key] if _is_less(factors, each[0], axes, len(shape(x))))
            found = next(less, None) if binding in gradients else None
            if found is None:
                known[key].append((factors, binding))
            else:
                body.assign(binding, _product(binding, found[1], factors - found[0], axes, body, scope))
                changed = True
        scope.bindings.append(binding)
    if changed:
        body.finish(scope.bindings, {})
        body.prune()


def _summed(binding: Binding, body: Body) -> Factors | None:
    """The factors of what a sum or a mean of float32 or float64 adds up; ``None`` for others."""
    call = binding.value
    if call.attrs.axis is None or not call.attrs.keepdims or dtype(binding.var) not in ("float32", "float64"):
        return None
    factors = _factors(call.args[0], body)
    return None if factors.total() > _MOST_FACTORS else factors


def _factors(value: Expr, body: Body) -> Factors:
    found, waiting = Counter(), [value]
    while waiting and found.total() <= _MOST_FACTORS:
        value = waiting.pop()
        binding = body.binding(value)
        if binding is None:
            found[str(value)] += 1
        elif binding.op == "relax.multiply":
            waiting.extend(binding.value.args)
        else:
            found[binding] += 1
    return found


def _is_less(factors: Factors, fewer: Factors, axes: list[int], rank: int) -> bool:
    """Whether a sum lacks only factors that are the same for all that is added."""
    more = factors - fewer
    return bool(more) and not fewer - factors and all(_is_constant(each, axes, rank) for each in more)


def _is_constant(factor: Binding | str, axes: list[int], rank: int) -> bool:
    if isinstance(factor, str) or not isinstance(factor.var.ty, TensorType):
        return False
    extents = shape(factor.var)
    missing = rank - len(extents)
    return all(axis < missing or same(extents[axis - missing], 1) for axis in axes)


def _axes(binding: Binding) -> list[int]:
    rank = len(shape(binding.value.args[0]))
    return sorted(int(axis) % rank for axis in binding.value.attrs.axis)


def _product(binding: Binding, total: Binding, more: Factors, axes: list[int], body: Body, scope: BodyScope) -> Expr:
    """What a sum is, of one of fewer factors."""
    value: Var = total.var
    extents = shape(binding.value.args[0])
    if binding.op != total.op:
        count = size(math.prod(extents[axis] for axis in axes), value)
        count = count if isinstance(count, Constant) else scope.emit(count)
        value = scope.emit((op.divide if binding.op == "relax.mean" else op.multiply)(value, count), total.name)
    *first, last = more.elements()
    for factor in first:
        value = scope.emit(op.multiply(value, factor.var), binding.name)
    return op.multiply(value, last.var)
