"""Gradients of convolutions: a call -> library calls (see the table in :mod:`autodiff.library`)."""

from __future__ import annotations

from collections.abc import Collection

from tvm import relax

from autodiff.gradients.registry import Emit, checks, gradient
from autodiff.ir import Call, Expr, ShapeExpr, Var, shape
from autodiff.library import call as library_call

__all__ = []

_LAYOUTS = {1: ("NCW", "OIW", "IOW"), 2: ("NCHW", "OIHW", "IOHW"), 3: ("NCDHW", "OIDHW", "IODHW")}


_CONVOLUTIONS = tuple(f"relax.nn.conv{rank}d{kind}" for rank in (1, 2, 3) for kind in ("", "_transpose"))


@gradient(*_CONVOLUTIONS)
def convolution(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr]:
    """dx = g convolved with the transposed kernel, dweight = x correlated with g, each a library call of its own"""
    x, weight = call.args
    geometry = _geometry(call)
    return [
        library_call("convolution_backward_input", [g, weight, ShapeExpr(shape(x)), *geometry], x.ty),
        library_call("convolution_backward_weight", [g, x, ShapeExpr(shape(weight)), *geometry], weight.ty),
    ]


@checks(*_CONVOLUTIONS)
def check_convolution(call: Call, active: Collection[Var]) -> str | None:
    """The library wants channels first and symmetric padding."""
    attrs = call.attrs
    rank = len(attrs.strides)
    data, kernel, kernel_transposed = _LAYOUTS[rank]
    given = (str(attrs.data_layout), str(attrs.kernel_layout), str(attrs.out_layout))
    wanted = (data, kernel_transposed if _transposed(call) else kernel, data)
    if given != wanted:
        return f"wanted the layouts {wanted}, got {given}"
    padding = [int(width) for width in attrs.padding]
    return None if padding[:rank] == padding[rank:] else f"wanted as much padding before as after, got {padding}"


def _transposed(call: Call) -> bool:
    return call.op.name.endswith("_transpose")


def _geometry(call: Call) -> list[Expr]:
    """``strides``, ``padding``, ``dilation``, ``output_padding`` (shapes), ``transposed`` and ``groups`` (integers)."""
    attrs = call.attrs
    rank = len(attrs.strides)
    shapes = [attrs.strides, attrs.padding[:rank], attrs.dilation]
    shapes.append(attrs.output_padding if _transposed(call) else [0] * rank)
    return [
        *(ShapeExpr([int(size) for size in sizes]) for sizes in shapes),
        relax.prim_value(int(_transposed(call))),
        relax.prim_value(int(attrs.groups)),
    ]
