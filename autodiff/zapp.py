"""Zapping (algebraic simplification): a function -> the same without what reverse mode leaves behind.

The names are those of the literature: ZappLike replaces ``..._like`` operations of known shape, ZeroZapp removes
additions of zero, OneZapp removes multiplications by one, the seed of the chain rule. There is no rule that makes
``x * 0`` zero: it is not, for infinities and NaN.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm.relax import op

from autodiff.body import Body, on_functions
from autodiff.constants import splat
from autodiff.extents import same_shape
from autodiff.gradients.registry import fit
from autodiff.ir import Call, Constant, Expr, Var, dtype, shape
from autodiff.rewrite import Scope, rewrite

__all__ = ["LIKE", "one_zapp", "zapp_like", "zero_zapp"]


@on_functions
def zapp_like(body: Body, since: int = 0) -> None:
    """``zeros_like``, ``ones_like``, ``full_like``, ``collapse_sum_like/to``, ``broadcast_to`` become plain operations.

    Safe: the shape of the pattern operand is known, and the operand itself is not needed.
    """
    rewrite(body, _ZAPP_LIKE, since)


@on_functions
def zero_zapp(body: Body, since: int = 0) -> None:
    """``x + 0``, ``0 + x`` and ``x - 0`` become ``x``, or ``broadcast_to(x)`` where the zeros gave the shape.

    Safe: the sum equals ``x`` for every ``x``; infinities and NaN pass (only ``-0.0`` now stays ``-0.0``).
    """
    rewrite(body, _ZERO_ZAPP, since)


@on_functions
def one_zapp(body: Body, since: int = 0) -> None:
    """``x * 1``, ``1 * x`` and ``x / 1`` become ``x``, or ``broadcast_to(x)`` where the ones gave the shape.

    Safe: the product is ``x``, bit for bit.
    """
    rewrite(body, _ONE_ZAPP, since)


#: ``..._like`` operations with the shape and element type of the operand that they only look at.
LIKE: dict[str, Callable[[Call], Expr]] = {
    "relax.zeros_like": lambda call: op.zeros(shape(call), dtype(call)),
    "relax.ones_like": lambda call: op.ones(shape(call), dtype(call)),
    "relax.full_like": lambda call: op.full(shape(call), call.args[1], dtype(call)),
}


def _like(call: Call, scope: Scope) -> Expr:
    return LIKE[call.op.name](call)


def _collapse(call: Call, scope: Scope) -> Expr:
    return fit(call.args[0], call, lambda value: value if isinstance(value, Var | Constant) else scope.emit(value))


def _broadcast_to(call: Call, scope: Scope) -> Expr | None:
    x = call.args[0]
    if same_shape(shape(x), shape(call)):
        return x
    if 0 in shape(call):
        return op.zeros(shape(call), dtype(call))
    new = len(shape(call)) - len(shape(x))
    if same_shape(shape(call), (*[1] * new, *shape(x))):
        return op.reshape(x, shape(call))
    return None


def _drop_second(neutral: int):
    def rule(call: Call, scope: Scope) -> Expr | None:
        x, y = call.args
        return _as(x, call) if splat(y, scope) == neutral else None

    return rule


def _drop_either(neutral: int):
    def rule(call: Call, scope: Scope) -> Expr | None:
        x, y = call.args
        if splat(y, scope) == neutral:
            return _as(x, call)
        return _as(y, call) if splat(x, scope) == neutral else None

    return rule


def _as(x: Expr, call: Call) -> Expr | None:
    """``x`` in the shape of the call's result; ``None`` if the element types differ."""
    if dtype(x) != dtype(call):
        return None
    return x if same_shape(shape(x), shape(call)) else op.broadcast_to(x, shape(call))


_ZAPP_LIKE = {
    **{name: [_like] for name in LIKE},
    "relax.collapse_sum_to": [_collapse],
    "relax.collapse_sum_like": [_collapse],
    "relax.broadcast_to": [_broadcast_to],
}
_ZERO_ZAPP = {"relax.add": [_drop_either(0)], "relax.subtract": [_drop_second(0)]}
_ONE_ZAPP = {"relax.multiply": [_drop_either(1)], "relax.divide": [_drop_second(1)]}
