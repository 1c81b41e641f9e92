"""Transposed products: the bindings of a forward and its backward -> the backward with fewer transposes.

The rule of a product transposes its operands, ``dB = transpose(A) @ g``; where an operand is a transpose itself (the
weight of a linear layer), the gradient of what it transposes is ``transpose(transpose(A) @ g)``, which is
``transpose(g) @ A``.
"""

from __future__ import annotations

from tvm.relax import op

from autodiff.ir import DataflowVar, Expr, Var, op_name, permutation, shape, substitute
from autodiff.typed import normalizer

__all__ = ["simplify_transposes"]

Body = list[tuple[Var, Expr]]


def simplify_transposes(forward: Body, backward: Body) -> tuple[Body, dict[Var, Var]]:
    """The backward after both rules, and what its variables that disappear are equal to.

    A transpose of a transpose is the variable under both, a copy what it copies. A transpose of a product is the
    product of the transposes in reverse order, each without a transpose if it can be.

    Safe: positions only; the terms of each sum of a product are the same, in the same order. The forward is looked at
    as if it were rewritten too, and stays as it is.
    """
    rewriter = _Rewriter()
    for var, value in forward:
        rewriter.rewrite(var, value)
    rewriter.body = []
    for var, value in backward:
        rewriter.rewrite(var, value)
    return rewriter.body, rewriter.equal


class _Rewriter:
    def __init__(self) -> None:
        self.body: Body = []
        self.equal: dict[Var, Var] = {}
        self._definitions: dict[Var, Expr] = {}
        self._normalize = normalizer()

    def rewrite(self, var: Var, value: Expr) -> None:
        """Appends the bindings that take the place of ``var = value``."""
        value = substitute(value, self.equal)
        if isinstance(value, Var):  # a copy, as of a scan's gradients
            self.equal[var] = value
            return
        if _is_transpose(value) and isinstance(value.args[0], Var):
            source = self._definitions.get(value.args[0])
            if _is_transpose(source) and isinstance(source.args[0], Var):
                self.equal[var] = source.args[0]
                return
            if op_name(source) == "relax.matmul" and min(len(shape(arg)) for arg in source.args) > 1:
                operands = [self._transposed(arg) for arg in reversed(source.args)]
                value = self._normalize(op.matmul(*operands, out_dtype=source.attrs.out_dtype))
        self._bind(var, value)

    def _bind(self, var: Var, value: Expr) -> Var:
        self._definitions[var] = value
        self.body.append((var, value))
        return var

    def _transposed(self, value: Expr) -> Expr:
        """What a transpose is a transpose of; of anything else its transpose."""
        source = self._definitions.get(value) if isinstance(value, Var) else None
        if _is_transpose(source):
            return source.args[0]
        rank = len(shape(value))
        turned = self._normalize(op.permute_dims(value, [*range(rank - 2), rank - 1, rank - 2]))
        return self._bind(DataflowVar("transposed", turned.ty), turned)


def _is_transpose(value: Expr | None) -> bool:
    """Whether a value exchanges the last two axes of a tensor, and nothing else."""
    rank = len(shape(value.args[0])) if op_name(value) == "relax.permute_dims" else 0
    return rank > 1 and permutation(value) == [*range(rank - 2), rank - 1, rank - 2]
