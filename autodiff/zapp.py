"""Zapping (algebraic simplification): a function -> the same without the redundant operations of reverse mode.

The rules' names are the literature's: ZappLike replaces ``..._like`` operations of known shape, ZeroZapp removes
additions of zero, OneZapp removes multiplications by one, the seed of the chain rule. There is no rule that makes
``x * 0`` zero: it is not, for infinities and NaN.

View simplification: a function -> the same without views and casts that undo or repeat one another.

Joining of pads: a sum of zero-padded tensors that do not overlap -> one concatenation.

The sum is the gradient of a tensor of which slices were read. A slice's gradient is a padding, and the chain rule adds
the paddings: ``n`` slices that partition a tensor (the gates of an LSTM, its time steps, query, key and value) cost
``n`` full tensors of mostly zeros and ``n - 1`` sums; one concatenation has the same elements.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm.relax import op

from autodiff.body import Binding, Body, Rule, Scope, const, on_functions, rewrite, splat, walk
from autodiff.extents import Dim, Extent, at_most, broadcast, same, same_shape, sample_of
from autodiff.gradients.registry import fit
from autodiff.ir import Call, Constant, Expr, StringImm, Tuple, Var, dtype, library_name, op_name, permutation, shape
from autodiff.library import call as library_call
from autodiff.ops import having

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


@on_functions
def zapp_like(body: Body, since: int = 0) -> None:
    """Replaces ``…_like``, ``collapse_sum_like/to`` and ``broadcast_to`` by plain operators: the shapes are known."""
    rewrite(body, _ZAPP_LIKE, since)


@on_functions
def zero_zapp(body: Body, since: int = 0) -> None:
    """Replaces ``x + 0``, ``0 + x``, ``x - 0`` by ``x``, or by ``broadcast_to(x)`` where the zeros gave the shape.

    Safe: the sum equals ``x`` for every ``x``; infinities and NaN pass (only ``-0.0`` now stays ``-0.0``). A library
    operator gets the real part alone of a complex operand whose imaginary part is 0.
    """
    rewrite(body, _ZERO_ZAPP, since)


@on_functions
def one_zapp(body: Body, since: int = 0) -> None:
    """Replaces ``x * 1``, ``1 * x``, ``x / 1`` by ``x``, or by ``broadcast_to(x)`` where the ones gave the shape.

    Safe: the product is ``x``, bit for bit.
    """
    rewrite(body, _ONE_ZAPP, since)


#: ``..._like`` operations with the shape and element type of the operand that they only look at.
LIKE: dict[str, Callable[[Call], Expr]] = {
    "relax.zeros_like": lambda call: op.zeros(shape(call), dtype(call)),
    "relax.ones_like": lambda call: op.ones(shape(call), dtype(call)),
    "relax.full_like": lambda call: op.full(shape(call), call.args[1], dtype(call)),
}


def _like(call: Call, scope: Scope) -> Expr:
    return LIKE[call.op.name](call)


def _collapse(call: Call, scope: Scope) -> Expr:
    return fit(call.args[0], call, lambda value: value if isinstance(value, Var | Constant) else scope.emit(value))


def _drop_broadcast(call: Call, scope: Scope) -> Expr | None:
    x = call.args[0]
    if same_shape(shape(x), shape(call)):
        return x
    if 0 in shape(call):
        return op.zeros(shape(call), dtype(call))
    new = len(shape(call)) - len(shape(x))
    if same_shape(shape(call), (*[1] * new, *shape(x))):
        return op.reshape(x, shape(call))
    return None


def _drop_second(neutral: int):
    def rule(call: Call, scope: Scope) -> Expr | None:
        x, y = call.args
        return _as(x, call) if splat(y, scope) == neutral else None

    return rule


def _drop_either(neutral: int):
    def rule(call: Call, scope: Scope) -> Expr | None:
        x, y = call.args
        if splat(y, scope) == neutral:
            return _as(x, call)
        return _as(y, call) if splat(x, scope) == neutral else None

    return rule


def _as(x: Expr, call: Call) -> Expr | None:
    """``x`` in the shape of the call's result; ``None`` if the element types differ."""
    if dtype(x) != dtype(call):
        return None
    return x if same_shape(shape(x), shape(call)) else op.broadcast_to(x, shape(call))


_ZAPP_LIKE = {
    **{name: [_like] for name in LIKE},
    "relax.collapse_sum_to": [_collapse],
    "relax.collapse_sum_like": [_collapse],
    "relax.broadcast_to": [_drop_broadcast],
}


def _real_operands(call: Call, scope: Scope) -> Expr | None:
    """A library operator of complex numbers whose imaginary parts are 0: the real parts, which the library converts."""
    if library_name(call) != "library.operator":
        return None
    _, name, arguments, *tensors = call.args
    text, real = arguments.value, {}
    for index, each in enumerate(tensors):
        wide, narrow = (json.dumps({kind: index}) for kind in ("$complex", "$real"))
        if wide in text and (part := _real_part(each, scope)) is not None:
            text, real[index] = text.replace(wide, narrow), part
    if not real:
        return None
    for index, part in real.items():
        tensors[index] = scope.emit(op.reshape(part, shape(tensors[index])[:-1]), "real")
    return library_call("operator", [name, StringImm(text), *tensors], call.ty)


def _real_part(value: Expr, scope: Scope) -> Expr | None:
    """``x``, of one element in the last dimension, of a tensor ``[x, 0]``; ``None`` for another one."""
    value = scope.definition(value)
    last = len(shape(value)) - 1
    if op_name(value) == "relax.nn.pad":
        pieces = zero_padding(value)
        return (
            value.args[0] if pieces and (pieces.axis, pieces.extent, pieces.parts[0][:2]) == (last, 2, (0, 1)) else None
        )
    if op_name(value) != "relax.concat" or not isinstance(value.args[0], Tuple) or len(value.args[0].fields) != 2:
        return None
    real, imaginary = value.args[0].fields
    zeros = splat(imaginary, scope) == 0 and shape(real)[-1] == shape(imaginary)[-1] == 1
    return real if zeros and value.attrs.axis is not None and int(value.attrs.axis) % (last + 1) == last else None


_ZERO_ZAPP = {
    "relax.add": [_drop_either(0)],
    "relax.subtract": [_drop_second(0)],
    "relax.call_pure_packed": [_real_operands],
}
_ONE_ZAPP = {"relax.multiply": [_drop_either(1)], "relax.divide": [_drop_second(1)]}


@on_functions
def deduplicate_views(body: Body, since: int = 0) -> None:
    """Merges views of views, drops views that change nothing, and sinks broadcasts into their readers.

    Safe: only positions of elements change. ``expand_dims``, ``squeeze``, ``flatten`` and transposes that move only
    size-1 dims become ``reshape``, so that comparisons see one operator. A cast that undoes a widening cast disappears;
    the other order rounds and stays.
    """
    rewrite(body, _VIEWS, since)


def _reshape(call: Call, scope: Scope) -> Expr | None:
    x = call.args[0]
    if same_shape(shape(x), shape(call)):
        return x
    if 0 in shape(call):
        return _to_reshape(call, scope)
    source = scope.definition(x)
    if op_name(source) == "relax.reshape":
        return op.reshape(source.args[0], shape(call))
    return None


def reshaped(value: Expr, extents: Sequence[Dim]) -> Expr:
    """``reshape``, or zeros for a result without elements, since Relax reads an extent of 0 as "copy the extent"."""
    return op.zeros(list(extents), dtype(value)) if 0 in extents else op.reshape(value, list(extents))


def _to_reshape(call: Call, scope: Scope) -> Expr:
    return reshaped(call.args[0], shape(call))


def _permute_dims(call: Call, scope: Scope) -> Expr | None:
    x = call.args[0]
    axes = permutation(call)
    if axes == sorted(axes):
        return x
    source = scope.definition(x)
    if op_name(source) == "relax.permute_dims":
        inner = permutation(source)
        return op.permute_dims(source.args[0], [inner[axis] for axis in axes])
    moved = [axis for axis in axes if not same(shape(x)[axis], 1)]
    return _to_reshape(call, scope) if moved == sorted(moved) else None


def _broadcast_to(call: Call, scope: Scope) -> Expr | None:
    source = scope.definition(call.args[0])
    if op_name(source) == "relax.broadcast_to":
        return op.broadcast_to(source.args[0], shape(call))
    return None


def _astype(call: Call, scope: Scope) -> Expr | None:
    x = call.args[0]
    if dtype(x) == dtype(call):
        return x
    source = scope.definition(x)
    if op_name(source) == "relax.astype":
        original = source.args[0]
        if dtype(original) == dtype(call) and (dtype(original), dtype(x)) in _EXACT_CASTS:
            return original
    return None


_EXACT_CASTS = {
    *((half, wide) for half in ("float16", "bfloat16") for wide in ("float32", "float64")),
    ("float32", "float64"),
    *(("bool", other) for other in ("uint8", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float64")),
    ("int32", "int64"),
    ("int32", "float64"),
}


def _fill(call: Call, scope: Scope) -> Expr | None:
    """A shape operation on a fill: a fill in the new shape."""
    value = splat(call.args[0], scope)
    return None if value is None else _filled(value, call)


def _filled(value: float | int | bool, like: Expr) -> Expr:
    """A fill with one number, in the shape and element type of ``like``."""
    if value == 0 and math.copysign(1, value) > 0:
        return op.zeros(shape(like), dtype(like))
    if value == 1:
        return op.ones(shape(like), dtype(like))
    return op.full(shape(like), const(value, like), dtype(like))


def _unbroadcast(call: Call, scope: Scope) -> Expr | None:
    """An elementwise operator reads operands from before a broadcast that it does itself; other readers keep it."""
    args = list(call.args)
    for index, arg in enumerate(args):
        narrow = _narrow(arg, scope)
        if narrow is not None:
            extents = [shape(other) for other in (*args[:index], narrow, *args[index + 1 :])]
            if same_shape(broadcast(extents), shape(call)):
                args[index] = narrow
    return None if args == list(call.args) else Call(call.op, args, call.attrs, ret_ty=call.ty)


def _hoist(call: Call, scope: Scope) -> Expr | None:
    """An elementwise operator of broadcast operands only: computed on fewer elements, then broadcast."""
    operands = [_narrow(arg, scope) if shape(arg) else arg for arg in call.args]
    if any(operand is None for operand in operands):
        return None
    extents = broadcast([shape(operand) for operand in operands])
    if sample_of(math.prod(extents)) >= sample_of(math.prod(shape(call))):
        return None
    narrow = scope.emit(Call(call.op, operands, call.attrs), "narrow")
    return op.broadcast_to(narrow, shape(call))


def _narrow(value: Expr, scope: Scope) -> Expr | None:
    source = scope.definition(value)
    if op_name(source) == "relax.broadcast_to":
        return source.args[0]
    if op_name(source) in ("relax.zeros", "relax.ones", "relax.full") and shape(source):
        number = splat(source, scope)
        return None if number is None else const(number, source)
    return None


def _negative(call: Call, scope: Scope) -> Expr | None:
    source = scope.definition(call.args[0])
    return source.args[0] if op_name(source) == "relax.negative" else None


_VIEWS: dict[str | None, list[Rule]] = {
    "relax.reshape": [_reshape, _fill],
    "relax.expand_dims": [_to_reshape],
    "relax.squeeze": [_to_reshape],
    "relax.flatten": [_to_reshape],
    "relax.permute_dims": [_permute_dims, _fill],
    "relax.broadcast_to": [_fill, _broadcast_to],
    **{name: [_hoist] for name in having("hoisted")},
    **{name: [_hoist, _unbroadcast] for name in having("hoisted", "broadcasting")},
    "relax.astype": [_astype, _hoist],
    "relax.negative": [_negative, _hoist],
}
