"""Joining of pads: a sum of zero-padded tensors that do not overlap -> one concatenation.

The sum is the gradient of a tensor of which slices were read. A slice's gradient is a padding, and the chain rule adds
the paddings: ``n`` slices that partition a tensor (the gates of an LSTM, its time steps, query, key and value) cost
``n`` full tensors of mostly zeros and ``n - 1`` sums; one concatenation has the same elements.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

from tvm.relax import op

from autodiff.body import Binding, Body, Scope, on_functions, walk
from autodiff.extents import Dim, Extent, at_most, same, same_shape
from autodiff.ir import Call, Expr, Tuple, Var, dtype, shape

_Part = tuple[Dim, Dim, Expr]


@dataclass
class _Pieces:
    """A tensor that is zero along ``axis`` but for ``parts``: ``(begin, end, value)``, disjoint and in order."""

    axis: int
    extent: Dim
    parts: list[_Part]
    symbolic: bool

    def joined(self, other: _Pieces, own: bool, others_own: bool) -> _Pieces | None:
        """The sum, or ``None`` where parts overlap or the axes differ.

        ``own``, ``others_own``: whether the sum is the only reader of these parts, so that it may extend their list.
        """
        if self.axis != other.axis:
            return None
        grows = len(self.parts) >= len(other.parts)
        large, small = (self, other) if grows else (other, self)
        symbolic = self.symbolic or other.symbolic
        places = [_place(large.parts, part, symbolic, grows) for part in small.parts]
        for place, (begin, end, _) in zip(places, small.parts, strict=True):
            if place and not at_most(large.parts[place - 1][1], begin):
                return None
            if place < len(large.parts) and not at_most(end, large.parts[place][0]):
                return None
        parts = large.parts if (own if grows else others_own) else list(large.parts)
        for place, part in zip(reversed(places), reversed(small.parts), strict=True):
            parts.insert(place, part)
        return _Pieces(self.axis, self.extent, parts, symbolic)


def _place(parts: list[_Part], part: _Part, symbolic: bool, behind_equals: bool) -> int:
    """The index at which to insert a part; equal (empty) parts stay in the order of the sum."""
    begin, end, _ = part
    if symbolic:
        return next((place for place, held in enumerate(parts) if not at_most(held[1], begin)), len(parts))
    position = bisect_right if behind_equals else bisect_left
    return position(parts, (begin, end), key=lambda held: held[:2])


@on_functions
def join_pads(body: Body, since: int = 0) -> None:
    """``pad(a) + pad(b) + …`` along one axis becomes ``concat(a, b, …)`` where the paddings leave disjoint ranges.

    Safe: every element is the sum of at most one number and zeros, which is that number (only ``-0.0`` now stays
    ``-0.0``); the other ranges are zeros. A partial sum that has other readers is joined separately.
    """
    pieces: dict[Binding, _Pieces] = {}
    joined: dict[Binding, None] = {}
    returned = body.returned()

    def own(binding: Binding) -> bool:
        return len(binding.users) == 1 and binding not in returned

    for binding in body.bindings:
        found = None
        if binding.op == "relax.nn.pad":
            found = zero_padding(binding.value)
        elif binding.op == "relax.concat":
            found = _between_zeros(binding.value, body)
        elif binding.op == "relax.add" and pieces:
            left, right = (body.binding(arg) for arg in binding.value.args)
            if left in pieces and right in pieces and same_shape(shape(left.var), shape(right.var)):
                found = pieces[left].joined(pieces[right], own(left), own(right))
        if found is not None:
            pieces[binding] = found
            if binding.op == "relax.add":
                joined[binding] = None
    read = {binding for binding in joined if binding in returned or any(user not in joined for user in binding.users)}
    for binding, scope in walk(body) if joined else ():
        if binding in read:
            body.assign(binding, _concatenation(pieces[binding], binding.var, scope))


def zero_padding(call: Call) -> _Pieces | None:
    """The part of a zero padding along one axis; ``None`` for another padding."""
    if len(call.args) != 1 or str(call.attrs.pad_mode) != "constant" or float(call.attrs.pad_value) != 0:
        return None
    (x,) = call.args
    widths = [int(width) for width in call.attrs.pad_width]
    padded = [axis for axis in range(len(shape(x))) if any(widths[2 * axis : 2 * axis + 2])]
    if len(padded) != 1 or min(widths) < 0:
        return None
    (axis,) = padded
    begin = widths[2 * axis]
    end = begin + shape(x)[axis]
    return _Pieces(axis, shape(call)[axis], [(begin, end, x)], isinstance(end, Extent))


def _between_zeros(call: Call, body: Body) -> _Pieces | None:
    """The part of a concatenation of one tensor with zeros, as made for symbolic widths, which ``pad`` cannot take."""
    axis = int(call.attrs.axis or 0) % len(shape(call))
    if not isinstance(call.args[0], Tuple) or not isinstance(shape(call)[axis], Extent):
        return None
    parts: list[_Part] = []
    end: Dim = 0
    for field in call.args[0].fields:
        begin, end = end, end + shape(field)[axis]
        binding = body.binding(field)
        if binding is None or binding.op != "relax.zeros":
            parts.append((begin, end, field))
    return _Pieces(axis, end, parts, symbolic=True) if len(parts) == 1 and len(call.args[0].fields) > 1 else None


def _concatenation(pieces: _Pieces, like: Var, scope: Scope) -> Call:
    """The concatenation of the parts, with zeros between them."""
    extents = list(shape(like))
    fields: list[Expr] = []
    position: Dim = 0
    for begin, end, value in (*pieces.parts, (pieces.extent, pieces.extent, None)):
        if not same(begin, position):
            extents[pieces.axis] = begin - position
            fields.append(scope.emit(op.zeros(extents, dtype(like)), "gap"))
        if value is not None:
            fields.append(value)
        position = end
    return op.concat(Tuple(fields), axis=pieces.axis)
