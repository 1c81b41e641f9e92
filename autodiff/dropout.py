"""Dropout masks as parameters: a function -> the same function, multiplying by masks that the caller draws."""

from __future__ import annotations

import numpy as np
from tvm import relax
from tvm.relax import op

from autodiff.body import Body, NameSupply, Scope, const, on_functions, rewrite
from autodiff.ir import Call, Expr, Tuple, Var, dtype, shape


@on_functions
def mask_dropout(body: Body) -> None:
    """``relax.nn.dropout(x, rate)`` becomes ``x * (mask * scale)``; ``mask_<k>`` is a new bool parameter of x's shape.

    The masks are appended to the parameters in the order of the dropouts. The operator's second result is the mask in
    x's dtype. Rate 0 is the identity and rate 1 is zeros, both without a mask parameter: PyTorch draws nothing for them
    (the mask result, should anything read it, is all ones or zeros). Safe: with ``mask ~ bernoulli(1 - rate)`` it is
    the definition (Srivastava et al., 2014), and the draw is no longer the compiler's to repeat or reorder.
    """
    taken = NameSupply(body.names())
    masks: list[Var] = []

    def multiply_by_mask(call: Call, scope: Scope) -> Expr:
        x, rate = call.args[0], float(call.attrs.rate)
        if not 0.0 <= rate <= 1.0:
            raise ValueError(f"dropout: wanted a rate between 0 and 1, got {rate}")
        if rate in (0.0, 1.0):
            keeps_all = rate == 0.0
            mask = scope.emit(op.full(shape(x), const(float(keeps_all), dtype(x)), dtype(x)), "mask_constant")
            return Tuple([x if keeps_all else scope.emit(op.zeros(shape(x), dtype(x)), "dropped"), mask])
        name = f"mask_{len(masks)}"
        if taken.fresh(name) != name:
            raise ValueError(f"dropout: the name {name!r} of a mask parameter is taken by another variable")
        mask = relax.Var(name, relax.TensorType(shape(x), "bool"))
        masks.append(mask)
        body.add_param(mask)
        kept = scope.emit(op.astype(mask, dtype(x)), f"{name}_noise")
        noise = scope.emit(op.multiply(kept, const(keep_scale(rate, dtype(x)), x)), f"{name}_scaled")
        return Tuple([scope.emit(op.multiply(x, noise), f"{name}_dropout"), kept])

    rewrite(body, {"relax.nn.dropout": [multiply_by_mask], None: [project]})


def keep_scale(rate: float, element_type: str) -> float:
    """``1 / (1 - rate)`` rounded as PyTorch rounds ``noise.div_(1 - rate)``: in float32 for float32 and narrower types.

    For half types the result must still be rounded, which making a constant of it does.
    """
    if element_type == "float64":
        return 1.0 / (1.0 - rate)
    return float(np.float32(1.0) / np.float32(1.0 - rate))


def project(value: Expr, scope: Scope) -> Expr | None:
    """Replaces field ``i`` of a tuple expression by that field."""
    if isinstance(value, relax.TupleGetItem):
        fields = scope.definition(value.tuple_value)
        if isinstance(fields, Tuple):
            return fields.fields[value.index]
    return None
