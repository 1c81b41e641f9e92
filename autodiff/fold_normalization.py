"""Folding of normalizations before differentiation: bindings -> bindings with one call per normalization.

Spelled out, ``y = (x - mean) * rstd`` has a chain-rule gradient that reads the centred values *and* ``y``. Seen as one
function of ``x`` it has a gradient that reads ``y`` and ``rstd`` alone (see
:mod:`autodiff.gradients.linalg`): one wide tensor less for the backward, and fewer operations.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax

from autodiff.ir import Call, Constant, Expr, Var, numpy_value, op_name, shape
from autodiff.library import call as library_call
from autodiff.redundancy import live_bindings

__all__ = ["fold_normalizations"]

#: The name of the step, ``library.normalize``. Only the function that TVM's ``Gradient`` sees has it; it never runs.
_FOLDED = "normalize"

Body = list[tuple[Var, Expr]]


def fold_normalizations(body: Body, result: Expr) -> Body:
    """``y = c * rstd`` with ``rstd = rsqrt(mean(c * c) + epsilon)`` becomes one call on what is normalized.

    That is ``x`` where ``c = x - mean(x)`` over the same axes (LayerNorm, GroupNorm, BatchNorm), else ``c`` itself
    (RMSNorm). Statistics that something else reads stay, and keep the gradient they have through that.

    Safe: variables hold the same values; the call has the derivative of what it stands for. What only ``y`` read is
    dropped.

    Args:
        body: bindings in flat form.
        result: what they are for.
    """
    definitions = dict(body)
    calls = {var: call for var, value in body if (call := _fold(var, value, definitions)) is not None}
    return live_bindings([(var, calls.get(var, value)) for var, value in body], [result]) if calls else body


def _fold(var: Var, value: Expr, definitions: dict[Var, Expr]) -> Call | None:
    if op_name(value) != "relax.multiply":
        return None
    for scaled, rstd in (value.args, reversed(value.args)):
        axes = _root_of_squares(scaled, rstd, definitions)
        if axes is None:
            continue
        source = _centred_from(scaled, axes, definitions)
        args = [scaled if source is None else source, rstd, relax.prim_value(int(source is not None))]
        return library_call(_FOLDED, args, var.ty)
    return None


def _root_of_squares(scaled: Expr, rstd: Expr, definitions: dict[Var, Expr]) -> list[int] | None:
    """The axes, if ``rstd`` is ``rsqrt(mean(scaled * scaled, axes, keepdims=True) + a number)``."""
    root = _call("relax.rsqrt", rstd, definitions)
    if root is None or not isinstance(scaled, Var):
        return None
    moment = root.args[0]
    shifted = _call("relax.add", moment, definitions)
    if shifted is not None:
        left, right = shifted.args
        moment = left if _is_number(right) else right if _is_number(left) else moment
    mean = _call("relax.mean", moment, definitions)
    if mean is None or not mean.attrs.keepdims:
        return None
    return _axes(mean) if _is_square_of(scaled, mean.args[0], definitions) else None


def _is_square_of(base: Var, value: Expr, definitions: dict[Var, Expr]) -> bool:
    call = definitions.get(value) if isinstance(value, Var) else None
    name = op_name(call) if call is not None else None
    if name == "relax.square":
        return call.args[0].same_as(base)
    if name == "relax.multiply":
        return all(arg.same_as(base) for arg in call.args)
    if name == "relax.power":
        return call.args[0].same_as(base) and _is_number(call.args[1]) and numpy_value(call.args[1]).item() == 2
    return False


def _centred_from(value: Var, axes: Sequence[int], definitions: dict[Var, Expr]) -> Expr | None:
    """``x``, if ``value`` is ``x - mean(x, axes, keepdims=True)``."""
    difference = _call("relax.subtract", value, definitions)
    if difference is None:
        return None
    source, offset = difference.args
    mean = _call("relax.mean", offset, definitions)
    if mean is None or not mean.attrs.keepdims or not isinstance(source, Var) or not mean.args[0].same_as(source):
        return None
    return source if _axes(mean) == axes else None


def _call(name: str, value: Expr, definitions: dict[Var, Expr]) -> Call | None:
    """What a variable is bound to, if it is a call of that operator."""
    found = definitions.get(value) if isinstance(value, Var) else None
    return found if found is not None and op_name(found) == name else None


def _axes(mean: Call) -> list[int]:
    rank = len(shape(mean.args[0]))
    return list(range(rank)) if mean.attrs.axis is None else sorted(int(axis) % rank for axis in mean.attrs.axis)


def _is_number(value: Expr) -> bool:
    return isinstance(value, Constant) and numpy_value(value).size == 1
