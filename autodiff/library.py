"""Library functions: operators that a numerical library computes, as seen by the compiler.

A *library call* is a pure Relax call ``R.call_pure_packed("library.<name>", *args, ty_args=...)``. Its
arguments are tensors, ``R.prim_value`` / ``R.str`` / ``R.shape`` constants, or tuples of tensors, and its
result type is spelled out. Nothing here computes: whoever runs the compiled program binds the names
(``bridge.compile.library`` binds them to PyTorch's kernels). Gradient rules for library functions are in
``autodiff.gradients.library``.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax

from autodiff.ir import LIBRARY_PREFIX, Call, Expr, TensorType, TupleType

__all__ = ["call"]


def call(name: str, args: Sequence[Expr], result: TensorType | TupleType) -> Call:
    """The call of library function ``library.<name>``; ``result`` is its type."""
    return relax.op.call_pure_packed(LIBRARY_PREFIX + name, *args, ty_args=result)
