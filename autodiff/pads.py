"""Joining of pads: a sum of zero-padded tensors that do not overlap -> one concatenation.

It is the gradient of a tensor of which slices were read. The rule of a slice is a padding, and the chain rule adds the
paddings up: ``n`` slices that partition a tensor (the gates of an LSTM, its time steps, query, key and value) cost
``n`` full tensors of mostly zeros and ``n - 1`` sums of them, where one concatenation has the same elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from tvm.relax import op

from autodiff.dce import live_bindings
from autodiff.ir import (
    Call,
    Expr,
    Function,
    Tuple,
    Var,
    bindings,
    dtype,
    op_name,
    results,
    shape,
    used_vars,
    with_outputs,
)
from autodiff.rewrite import Scope, names

__all__ = ["join_pads"]


@dataclass(frozen=True)
class _Pieces:
    """A tensor that is zero along ``axis`` but for ``parts``: ``(begin, end, value)``, disjoint and in order."""

    axis: int
    extent: int
    parts: tuple[tuple[int, int, Expr], ...]

    def join(self, other: _Pieces) -> _Pieces | None:
        """The sum, or ``None`` where it is not a plain concatenation."""
        if self.axis != other.axis:
            return None
        parts = tuple(sorted((*self.parts, *other.parts), key=lambda part: part[:2]))
        if any(before[1] > after[0] for before, after in pairwise(parts)):
            return None
        return _Pieces(self.axis, self.extent, parts)


def join_pads(func: Function) -> Function:
    """``pad(a) + pad(b) + …`` along one axis becomes ``concat(a, b, …)`` where the paddings leave disjoint ranges.

    Safe: every element is the sum of at most one number and zeros, which is that number (only ``-0.0`` now stays
    ``-0.0``); ranges that nobody fills are zeros. A sum that is read on the way is joined for itself.
    """
    pieces: dict[Var, _Pieces] = {}
    joined: set[Var] = set()
    for var, value in bindings(func):
        found = None
        if op_name(value) == "relax.nn.pad":
            found = _padding(value)
        elif op_name(value) == "relax.add" and all(isinstance(arg, Var) and arg in pieces for arg in value.args):
            found = pieces[value.args[0]].join(pieces[value.args[1]])
            joined |= {var} if found is not None else set()
        if found is not None:
            pieces[var] = found
    if not joined:
        return func
    read = {output for output in results(func) if isinstance(output, Var)}
    for var, value in bindings(func):
        if var not in joined:
            read.update(used_vars(value))
    scope = Scope(names(func))
    for var, value in bindings(func):
        scope.bind(var, _concatenation(pieces[var], var, scope) if var in joined & read else value)
    return with_outputs(func, live_bindings(scope.body, results(func)), results(func))


def _padding(call: Call) -> _Pieces | None:
    """The piece of a zero padding of one axis."""
    if len(call.args) != 1 or str(call.attrs.pad_mode) != "constant" or float(call.attrs.pad_value) != 0:
        return None
    (x,) = call.args
    widths = [int(width) for width in call.attrs.pad_width]
    padded = [axis for axis in range(len(shape(x))) if any(widths[2 * axis : 2 * axis + 2])]
    if len(padded) != 1 or min(widths) < 0:
        return None
    (axis,) = padded
    begin = widths[2 * axis]
    return _Pieces(axis, shape(call)[axis], ((begin, begin + shape(x)[axis], x),))


def _concatenation(pieces: _Pieces, like: Var, scope: Scope) -> Call:
    """The pieces one after another, with zeros where there is none."""
    extents = list(shape(like))
    fields: list[Expr] = []
    position = 0
    for begin, end, value in (*pieces.parts, (pieces.extent, pieces.extent, None)):
        if begin > position:
            extents[pieces.axis] = begin - position
            fields.append(scope.emit(op.zeros(extents, dtype(like)), "gap"))
        if value is not None:
            fields.append(value)
        position = end
    return op.concat(Tuple(fields), axis=pieces.axis)
