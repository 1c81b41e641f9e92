"""Decomposition of LayerNorm -> statistics, multiply and add; normalizations as one step of a differentiation.

Folding before differentiation: bindings -> bindings with one call per normalization. The chain-rule gradient of
``y = (x - mean) * rstd`` reads the centred values *and* ``y``. As one function of ``x``, its gradient reads ``y`` and
``rstd`` alone (see :mod:`autodiff.gradients.tensors`): one wide tensor less for the backward, and fewer operations.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax
from tvm.relax import op

from autodiff.body import Body, Scope, const, on_functions, rewrite
from autodiff.extents import same_shape
from autodiff.ir import Call, Constant, Expr, Pairs, Var, axes_of, compute_type, dtype, numpy_value, op_name, shape
from autodiff.library import call as library_call
from autodiff.redundancy import live_bindings


def cast(value: Expr, element_type: str, scope: Scope, name: str) -> Expr:
    """``value`` cast to ``element_type``; unchanged if it has that type already."""
    return value if dtype(value) == element_type else scope.emit(op.astype(value, element_type), name)


def layer_norm(
    x: Expr, gamma: Expr | None, beta: Expr | None, axes: Sequence[int], epsilon: float, scope: Scope
) -> Expr:
    """Binds LayerNorm of ``x`` over ``axes`` (Ba et al., 2016), and returns it in the type of ``x``.

    ``gamma`` and ``beta`` have the extents of ``x`` along ``axes``, in that order, or are ``None``. The variance is the
    biased one of centred values (E[x^2] - E[x]^2 cancels catastrophically); statistics are in float32 for half types
    (TVM's own operator refuses bfloat16). Mean and rstd have one element per row, so that they can be saved for the
    backward instead of wide tensors; the gradient of rstd, one variable, reads only the variable itself.
    """

    def bind(value: Expr, name: str) -> Var:
        return scope.emit(value, f"layer_norm_{name}")

    rank, element_type = len(shape(x)), dtype(x)
    axes = sorted(axis % rank for axis in axes)
    wide = cast(x, compute_type(element_type), scope, "layer_norm_wide")
    centred = bind(op.subtract(wide, bind(op.mean(wide, axes, keepdims=True), "mean")), "centred")
    variance = bind(op.mean(bind(op.square(centred), "squared"), axes, keepdims=True), "variance")
    rstd = bind(op.rsqrt(bind(op.add(variance, const(epsilon, variance)), "shifted")), "rstd")
    y = bind(op.multiply(centred, rstd), "normalized")
    along = [shape(x)[axis] if axis in axes else 1 for axis in range(axes[0], rank)]
    gamma, beta = (  # with axes of size 1 where theirs are not the last ones
        value if value is None or same_shape(shape(value), along) else bind(op.reshape(value, along), "spread")
        for value in (gamma, beta)
    )
    if gamma is not None:
        y = bind(op.multiply(y, cast(gamma, dtype(y), scope, "layer_norm_scale")), "scaled")
    if beta is not None:
        y = bind(op.add(y, cast(beta, dtype(y), scope, "layer_norm_offset")), "shifted")
    return cast(y, element_type, scope, "layer_norm_output")


def _spell_layer_norm(call: Call, scope: Scope) -> Expr:
    """``relax.nn.layer_norm`` becomes mean, centred variance, rstd, multiply and add."""
    (x, gamma, beta), attrs = call.args, call.attrs
    axes, epsilon = [int(axis) for axis in attrs.axes], float(attrs.epsilon)
    return layer_norm(x, gamma if attrs.scale else None, beta if attrs.center else None, axes, epsilon, scope)


SPELLINGS = {"relax.nn.layer_norm": [_spell_layer_norm]}


@on_functions
def spell_out(body: Body) -> None:
    """Replaces LayerNorm by mean, centred variance, rstd, multiply and add.

    Safe: that is its definition. Why: TVM has no gradient for it, and row statistics are smaller to save. The importer
    writes other normalizations as arithmetic (:mod:`bridge.aten.nn`).
    """
    rewrite(body, SPELLINGS)


#: The name of the step, ``library.normalize``. Only the function that TVM's ``Gradient`` sees has it; it never runs.
_FOLDED = "normalize"


def fold_normalizations(body: Pairs, result: Expr) -> Pairs:
    """Replaces ``y = c * rstd``, ``rstd = rsqrt(mean(c * c) + epsilon)``, by one call on the tensor it normalizes.

    That tensor is ``x`` where ``c = x - mean(x)`` over the same axes (LayerNorm, GroupNorm, BatchNorm), else ``c``
    (RMSNorm). Statistics that other bindings read stay, and keep the gradient through those bindings. Bindings that
    only ``y`` read are dropped.

    Safe: variables hold the same values; the call has the derivative of the expression that it replaces.

    Args:
        body: bindings in flat form.
        result: the variable that they compute.
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
    """The axes, if ``rstd`` is ``rsqrt(mean(scaled * scaled, axes, keepdims=True) + a number)``, else ``None``."""
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
    return axes_of(mean) if _is_square_of(scaled, mean.args[0], definitions) else None


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
    """``x``, if ``value`` is ``x - mean(x, axes, keepdims=True)``, else ``None``."""
    difference = _call("relax.subtract", value, definitions)
    if difference is None:
        return None
    source, offset = difference.args
    mean = _call("relax.mean", offset, definitions)
    if mean is None or not mean.attrs.keepdims or not isinstance(source, Var) or not mean.args[0].same_as(source):
        return None
    return source if axes_of(mean) == axes else None


def _call(name: str, value: Expr, definitions: dict[Var, Expr]) -> Call | None:
    """A variable's definition if it is a call of the named operator, else ``None``."""
    found = definitions.get(value) if isinstance(value, Var) else None
    return found if found is not None and op_name(found) == name else None


def _is_number(value: Expr) -> bool:
    return isinstance(value, Constant) and numpy_value(value).size == 1
