"""Seeding the VJP: a function -> the same with one scalar result whose gradients are vector-Jacobian products."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax
from tvm.relax import op

from autodiff.body import Body, on_functions
from autodiff.ir import Var, dtype, is_float
from autodiff.normalization import cast, statistics_dtype
from autodiff.rewrite import BodyScope, Scope

__all__ = ["seed_vjp"]


@on_functions
def seed_vjp(body: Body, outputs: Sequence[int]) -> None:
    """Adds a parameter ``grad_out_<i>`` per listed output and a first result: ``sum_i sum(output_i * grad_out_i)``.

    The results become the scalar (float32 for half types) followed by all results of ``func``. Safe: nothing else
    changes. Why: TVM's gradient wants a scalar target, and the gradient of this one is the vector-Jacobian product.

    Raises ``ValueError`` for an index out of range, listed twice or not of floating point type, and for a name taken.
    """
    primal = body.outputs
    taken = body.names()
    if not outputs:
        raise ValueError("seed_vjp: wanted at least one output to differentiate, got none")
    if len(set(outputs)) != len(outputs):
        raise ValueError(f"seed_vjp: wanted each output once, got {list(outputs)}")
    scope = BodyScope(body, body.bindings)
    total = None
    for index in outputs:
        if not 0 <= index < len(primal):
            raise ValueError(f"seed_vjp: wanted an output index below {len(primal)}, got {index}")
        output = primal[index]
        if not is_float(output):
            raise ValueError(f"seed_vjp: wanted a floating point tensor as output {index}, got {output.ty}")
        name = f"grad_out_{index}"
        if name in taken:
            raise ValueError(f"seed_vjp: the name {name!r} is taken by another variable")
        grad_out = relax.Var(name, output.ty)
        body.add_param(grad_out)
        # TVM refuses a half target; the cast's gradient casts back, which `clean` removes.
        wide = statistics_dtype(dtype(output))
        weighted = scope.emit(
            op.multiply(cast(output, wide, scope, f"wide_{index}"), cast(grad_out, wide, scope, f"{name}_wide")),
            f"weighted_{index}",
        )
        term = scope.emit(op.sum(weighted), f"vjp_{index}")
        total = term if total is None else _add(total, term, scope)
    body.outputs = [total, *primal]
    body.finish(scope.bindings, {})


def _add(left: Var, right: Var, scope: Scope) -> Var:
    wide = "float64" if "float64" in (dtype(left), dtype(right)) else "float32"
    return scope.emit(op.add(cast(left, wide, scope, "vjp"), cast(right, wide, scope, "vjp")), "vjp")
