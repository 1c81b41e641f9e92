"""The gradient of a normalization taken as one step (see :mod:`autodiff.fold_normalization`)."""

from __future__ import annotations

from tvm.relax import op

from autodiff.extents import same
from autodiff.gradients.registry import Emit, library_gradient
from autodiff.ir import Call, Expr, Var, shape

__all__ = []


@library_gradient("library.normalize", wide=True)
def normalize(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
    """dx = rstd (g - mean(g) - y mean(g y)), where y = (x - mean(x)) rstd; without mean(g) where y = x rstd

    ``rstd`` keeps the reduced axes as size 1, and may be summed over any other axis of that size.
    """
    _, rstd, centred = call.args
    axes = [axis for axis, extent in enumerate(shape(rstd)) if same(extent, 1)]
    slope = emit(op.mean(emit(g * y), axes, keepdims=True))
    if not int(centred.value):
        return [rstd * (g - y * slope), None, None]
    offset = emit(op.mean(g, axes, keepdims=True))
    return [rstd * (emit(g - offset) - y * slope), None, None]
