"""Biased products: a product of matrices with one vector added to all rows -> one library call.

The library's kernels of products add a bias before they round, as eager's linear layers do: no kernel of its own reads
and writes the result once more, and of half types it is rounded once instead of twice.
"""

from __future__ import annotations

import math

from autodiff.body import Binding, Body, on_functions
from autodiff.extents import Extent, same, sample_of
from autodiff.ir import Expr, ShapeExpr, TensorType, Var, dtype, shape
from autodiff.library import call

__all__ = ["biased_products"]

_ROWS = 256
"""Fewer are a step of a loop, or what a kernel that computes more reads again from a cache."""

_ROWS_OF_FLOAT32 = 4096
"""Of float32 the kernels that add a bias are slow for fewer: 256 rows by 768 x 768 and 3072 x 768 take 1.35 and 2.2
times as long, a step of BertLayer of 1,024 rows 1.03 times (H200); of 10,496 rows as long."""

_UNIT = 8
"""Rows of a multiple of so many numbers begin where the library's quick kernels want them, of every type. Of the result
they may begin anywhere: a large product is padded then (:mod:`bridge.compile.passes.pad_products`), others take as long
with a bias as without (2048 x 1001 x 2048 in half types, 4096 x 50257 x 768 in float32; H200)."""

_TYPES = ("float16", "bfloat16", "float32")


@on_functions
def biased_products(body: Body) -> None:
    """``add(reshape(matmul(x, w), extents), b)`` becomes ``library.biased_product(x, w, b, extents)``, of many rows.

    Safe: nothing else reads the product. A result may be rounded otherwise, and is so wherever the call is computed.
    """
    returned = body.returned()
    for binding in body.bindings:
        found = _operands(binding, body, returned)
        if found is not None:
            body.assign(binding, call("biased_product", [*found, ShapeExpr(shape(binding.var))], binding.var.ty))
            body.counts.rewrites += 1
    body.prune()


def _operands(binding: Binding, body: Body, returned: set[Binding]) -> tuple[Expr, Expr, Expr] | None:
    """Rows, matrix and bias of what a binding adds up."""
    if binding.op != "relax.add":
        return None
    for product, bias in (binding.value.args, list(binding.value.args)[::-1]):
        made = _read_once(body.binding(product), returned)
        if made is not None and made.op == "relax.reshape":
            made = _read_once(body.binding(made.value.args[0]), returned)
        if made is not None and made.op == "relax.matmul" and _fits(binding, *made.value.args, bias):
            return (*made.value.args, bias)
    return None


def _read_once(binding: Binding | None, returned: set[Binding]) -> Binding | None:
    return binding if binding is not None and len(binding.users) == 1 and binding not in returned else None


def _fits(binding: Binding, rows: Expr, matrix: Expr, bias: Expr) -> bool:
    if not isinstance(bias, Var) or not isinstance(bias.ty, TensorType):
        return False
    kinds = {dtype(each) for each in (binding.var, rows, matrix, bias)}
    extents = [shape(each) for each in (rows, matrix, bias)]
    if [len(each) for each in extents] != [2, 2, 1] or len(kinds) > 1 or kinds.isdisjoint(_TYPES):
        return False
    (m, k), (_, n), (width,) = extents
    whole = shape(binding.var)
    if any(isinstance(each, Extent) for each in (k, n, width, whole[-1])) or width != n or whole[-1] != n:
        return False
    least = _ROWS_OF_FLOAT32 if "float32" in kinds else _ROWS
    return sample_of(m) >= least and k % _UNIT == 0 and same(math.prod(whole[:-1]), m)
