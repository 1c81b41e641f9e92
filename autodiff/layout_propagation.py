"""Layout propagation: sinks transposes of channels and attention heads below the operators that read them.

Channels last: operators on permuted convolution results -> the same operators on channels_last tensors, then a permute.
A convolution (a pool, an interpolation) returns eager's memory order with channels as the second axis, by a
``permute_dims``. This pass sinks it below point-wise operators, reductions, slices, pads, concatenations and reshapes
to channel groups, which then walk memory in order; between two convolutions nothing of it is left. So it does with any
permutation whose last axis is the channels of a batch normalization (or of another sum over all other axes), or that
inverts the permutation before it, by which the importer marks a memory order. In a backward, gradients of convolutions
and pools are permuted in the same way, and added where two branches meet.

Rows before heads: operators on an attention's permuted operands -> the same operators on (batch, row, head, column),
the layout of the fused attention kernels and of a projection's result. Forward permutes heads to the front, and may
compute in that order, a rotary embedding for instance. This pass sinks the permutation to the attention call.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from tvm import relax
from tvm.relax import op

from autodiff.body import Binding, Body, BodyScope, on_functions, walk
from autodiff.extents import Dim, Extent, same, same_shape
from autodiff.ir import (
    Call,
    Constant,
    Expr,
    TensorType,
    Tuple,
    TupleGetItem,
    Var,
    axes_of,
    dtype,
    inverse,
    library_name,
    permutation,
    shape,
)
from autodiff.ops import POINTWISE, having
from autodiff.zapp import reshaped

_WINDOWS = ("adaptive_avg_pool", "avg_pool", "max_pool", "upsample")
_SOURCES = {"library.convolution_last", "library.convolution_last_backward_input"}
_SOURCES |= {f"library.{name}_last{end}" for name in _WINDOWS for end in ("", "_backward")}
_POINTWISE = having("elementwise") | {"relax.grad.no_grad", "library.with_derivative"}
_REDUCTIONS = {f"relax.{name}": getattr(op, name) for name in ("sum", "mean", "max", "min", "prod")}

Axes = list[int]


@on_functions
def sink_channel_permutes(body: Body) -> None:
    """Sinks ``permute_dims`` to channels_first: ``f(permute_dims(x))`` becomes ``permute_dims(f(x))``.

    ``f`` is a point-wise operator, a reduction, slice, pad, concatenation or a reshape of axes adjacent in memory.
    ``x`` is a channels_last result of a library function, a tensor whose last axis a sum over all other axes keeps, or
    a tensor permuted the other way before. Safe: the same operator is applied to the same elements; a reduction adds
    them in another order.
    """
    sources = _sources(body)
    if not sources:
        return
    pass_ = _Pass(body, sources)
    for binding, scope in walk(body):
        pass_.add(binding, scope)


def _sources(body: Body) -> set[Binding]:
    """The permutations that are sunk."""
    found: set[Binding] = set()
    made_of: dict[Var, dict[Binding, Axes]] = {}  # values made point-wise of permutations of the same shape
    for binding in body.bindings:
        if binding.op == "relax.permute_dims":
            axes = permutation(binding.value)
            if _is_given(body, binding.value.args[0]) or _is_turned_back(body.binding(binding.value.args[0]), axes):
                found.add(binding)
            elif axes[-1] != len(axes) - 1:
                made_of[binding.var] = {binding: axes}
        elif binding.op in _REDUCTIONS and binding.value.args[0] in made_of:
            for source, axes in made_of[binding.value.args[0]].items():
                left = set(range(len(axes))) - {*axes_of(binding.value)}
                if left == {axes.index(len(axes) - 1)}:
                    found.add(source)
        elif _is_pointwise(binding):
            reads = [made_of[arg] for arg in binding.value.args if isinstance(arg, Var) and arg in made_of]
            extents = shape(binding.var) if reads else ()
            made = {source: axes for read in reads for source, axes in read.items()}
            made_of[binding.var] = {
                source: axes for source, axes in made.items() if same_shape(shape(source.var), extents)
            }
    return found


def _is_given(body: Body, value: Expr) -> bool:
    """Whether a tensor is the result of a library function whose channels are its last axis."""
    found = body.binding(value)
    if found is not None and isinstance(found.value, TupleGetItem):
        found = body.binding(found.value.tuple_value)
    return found is not None and found.value is not None and library_name(found.value) in _SOURCES


def _is_turned_back(read: Binding | None, axes: Axes) -> bool:
    """Whether a permutation inverts the permutation before it, which moved the last axis."""
    if read is None or read.op != "relax.permute_dims":
        return False
    before = permutation(read.value)
    return before[-1] != len(axes) - 1 and [before[axis] for axis in axes] == [*range(len(axes))]


def _is_pointwise(binding: Binding) -> bool:
    """Whether an operator computes each element of its result from the elements at the same position."""
    return binding.op in _POINTWISE or (binding.value is not None and library_name(binding.value) in _POINTWISE)


def _regrouped(before: Sequence[Dim], after: Sequence[Dim]) -> list[tuple[list[int], list[int]]] | None:
    """Smallest groups of axes of two shapes that hold the same elements; ``None`` where an axis of extent 1 comes or
    goes at an end, or symbolic extents differ."""
    groups: list[tuple[list[int], list[int]]] = []
    a = b = 0
    while a < len(before) and b < len(after):
        old, new = [a], [b]
        sizes = before[a], after[b]
        while not same(*sizes):
            if isinstance(sizes[0], Extent) or isinstance(sizes[1], Extent):
                return None
            if sizes[0] < sizes[1]:
                old.append(old[-1] + 1)
            else:
                new.append(new[-1] + 1)
            if old[-1] == len(before) or new[-1] == len(after):
                return None
            sizes = math.prod(before[axis] for axis in old), math.prod(after[axis] for axis in new)
        groups.append((old, new))
        a, b = old[-1] + 1, new[-1] + 1
    return groups if a == len(before) and b == len(after) else None


class _Pass:
    """One walk over a body that sinks permutations.

    Attributes:
        moved: variable -> the tensor that it permutes, and the axes.
        behind: variable that is an identity permutation of a tensor in memory order -> that tensor.
    """

    def __init__(self, body: Body, sources: set[Binding]) -> None:
        self.body, self.sources = body, sources
        self.moved: dict[Var, tuple[Expr, Axes]] = {}
        self.behind: dict[Var, Expr] = {}

    def add(self, binding: Binding, scope: BodyScope) -> None:
        """Lets a binding read operands in memory order where one of them is permuted."""
        self.scope, value = scope, binding.value
        if binding.op == "relax.permute_dims" and value.args[0] in self.behind:
            self._replace(binding, self.behind[value.args[0]], permutation(binding.value))
        elif binding.op == "relax.permute_dims" and value.args[0] in self.moved:
            self._permutation(binding, *self.moved[value.args[0]])
        elif binding in self.sources:
            self.moved[binding.var] = value.args[0], permutation(binding.value)
        elif binding.op == "relax.concat":
            self._concat(binding, value)
        elif binding.op is not None and any(arg in self.moved for arg in value.args if isinstance(arg, Var)):
            if _is_pointwise(binding):
                self._pointwise(binding, value)
            elif binding.op in _REDUCTIONS and value.attrs.axis is not None:
                self._reduction(binding, value)
            elif binding.op == "relax.strided_slice":
                self._slice(binding, value)
            elif binding.op == "relax.nn.pad":
                self._pad(binding, value)
            elif binding.op == "relax.reshape":
                self._reshape(binding, *self.moved[value.args[0]])

    def _permutation(self, binding: Binding, x: Expr, axes: Axes) -> None:
        """Composes two permutations."""
        both = [axes[axis] for axis in permutation(binding.value)]
        if both == sorted(both):
            self.body.assign(binding, op.permute_dims(x, both))
            self.behind[binding.var] = x
        else:
            self._replace(binding, x, both)

    def _pointwise(self, binding: Binding, call: Call) -> None:
        extents = shape(binding.var)
        axes = next((self.moved[arg][1] for arg in call.args if self._is_whole(arg, extents)), None)
        if axes is None:
            return
        args = [self._behind(arg, axes) for arg in call.args]
        kinds = call.ty_args
        if library_name(call) is not None:
            kinds = [TensorType([extents[axis] for axis in inverse(axes)], dtype(binding.var))]
        made = self.scope.emit(Call(call.op, args, call.attrs, kinds), f"{binding.name}_last")
        self._replace(binding, made, axes)

    def _is_whole(self, arg: Expr, extents: Sequence) -> bool:
        return isinstance(arg, Var) and arg in self.moved and same_shape(shape(arg), extents)

    def _behind(self, arg: Expr, axes: Axes) -> Expr:
        """An operand in memory order: the unpermuted tensor, or a permuted view of the operand."""
        if isinstance(arg, Var) and arg in self.moved and self.moved[arg][1] == axes:
            return self.moved[arg][0]
        if not isinstance(arg, Var | Constant) or not isinstance(arg.ty, TensorType) or not shape(arg):
            return arg
        extents = [*[1] * (len(axes) - len(shape(arg))), *shape(arg)]
        if len(extents) > len(shape(arg)):
            arg = self.scope.emit(reshaped(arg, extents))
        order = inverse(axes)
        wanted = [extents[axis] for axis in order]
        if sum(not same(extent, 1) for extent in extents) <= 1:
            return self.scope.emit(reshaped(arg, wanted))
        return self.scope.emit(op.permute_dims(arg, order))

    def _concat(self, binding: Binding, call: Call) -> None:
        """A concatenation in memory order; fields in another order are permuted."""
        fields = call.args[0].fields if isinstance(call.args[0], Tuple) else ()
        axes = next((self.moved[field][1] for field in fields if isinstance(field, Var) and field in self.moved), None)
        if axes is None or call.attrs.axis is None:
            return
        fields = [self._behind(field, axes) for field in fields]
        made = op.concat(fields, axes[int(call.attrs.axis) % len(axes)])
        self._replace(binding, self.scope.emit(made, f"{binding.name}_last"), axes)

    def _slice(self, binding: Binding, call: Call) -> None:
        x, axes = self.moved[call.args[0]]
        cut = Tuple([relax.prim_value(axes[int(axis) % len(axes)]) for axis in call.args[1].fields])
        made = Call(call.op, [x, cut, *call.args[2:]], call.attrs, call.ty_args)
        self._replace(binding, self.scope.emit(made, f"{binding.name}_last"), axes)

    def _pad(self, binding: Binding, call: Call) -> None:
        x, axes = self.moved[call.args[0]]
        widths = [int(width) for axis in inverse(axes) for width in call.attrs.pad_width[2 * axis : 2 * axis + 2]]
        made = op.nn.pad(x, widths, str(call.attrs.pad_mode), float(call.attrs.pad_value))
        self._replace(binding, self.scope.emit(made, f"{binding.name}_last"), axes)

    def _reshape(self, binding: Binding, x: Expr, axes: Axes) -> None:
        """A reshape that splits axes, or joins axes adjacent in memory: channels into groups, and back."""
        before, after = shape(binding.value.args[0]), shape(binding.var)
        groups = _regrouped(before, after)
        if groups is None or any(axes[a] + 1 != axes[b] for old, _ in groups for a, b in itertools.pairwise(old)):
            return
        inside = sorted(groups, key=lambda group: axes[group[0][0]])
        order = [axis for _, new in inside for axis in new]
        made = self.scope.emit(reshaped(x, [after[axis] for axis in order]), f"{binding.name}_last")
        self._replace(binding, made, [order.index(axis) for axis in range(len(after))])

    def _reduction(self, binding: Binding, call: Call) -> None:
        x, axes = self.moved[call.args[0]]
        reduced = axes_of(call)
        keeps = bool(call.attrs.keepdims)
        made = _REDUCTIONS[binding.op](x, sorted(axes[axis] for axis in reduced), keepdims=keeps)
        left = [axes[axis] for axis in range(len(axes)) if axis not in reduced]
        order = [sorted(left).index(axis) for axis in left]
        if keeps:
            self._replace(binding, self.scope.emit(made, f"{binding.name}_last"), axes)
        elif order == sorted(order):
            self.body.assign(binding, made)
        else:
            self.body.assign(binding, op.permute_dims(self.scope.emit(made, f"{binding.name}_last"), order))

    def _replace(self, binding: Binding, made: Expr, axes: Axes) -> None:
        self.body.assign(binding, op.permute_dims(made, axes))
        self.moved[binding.var] = made, axes


_ATTENTION = ("library.attention", "library.dropping_attention")
_OPERANDS = slice(2, 5)
"""Queries, keys and values among the arguments of the call, after the function's and the kernel's names."""

_ROWS_BEFORE_HEADS = [0, 2, 1, 3]
"""Axis order: rows before heads; its own inverse."""

_COLUMNS = 3


@on_functions
def sink_head_permutes(body: Body) -> None:
    """Sinks ``permute_dims(x, [0, 2, 1, 3])`` below point-wise operators, slices and concatenations of columns.

    Attention must read the result; every operand must be permuted so, or be the same for all heads. Safe: the same
    operators are applied to the same elements.
    """
    moves = _moves(body)
    if not moves:
        return
    rows: dict[Var, Var] = {}
    for binding, scope in walk(body):
        if binding in moves:
            made = scope.emit(_moved(binding.value, rows, scope), f"{binding.name}_rows")
            rows[binding.var] = made
            body.assign(binding, op.permute_dims(made, _ROWS_BEFORE_HEADS))
        elif _is_permuted(binding):
            rows[binding.var] = binding.value.args[0]


def _moves(body: Body) -> set[Binding]:
    """The bindings between permutations and attention that can be computed in the order rows before heads."""
    made_of: dict[Binding, list[Binding]] = {}
    wanted: list[Binding] = []
    for binding in body.bindings:
        if library_name(binding.value) in _ATTENTION:
            wanted += [body.binding(operand) for operand in binding.value.args[_OPERANDS]]
        elif _keeps_columns(binding):
            whole = [body.binding(read) for read in _operands(binding.value) if not _is_of_all_heads(read)]
            if whole and all(read in made_of or _is_permuted(read) for read in whole):
                made_of[binding] = whole
    found: set[Binding] = set()
    while wanted:
        binding = wanted.pop()
        if binding in made_of and binding not in found:
            found.add(binding)
            wanted += made_of[binding]
    return found


def _is_permuted(binding: Binding | None) -> bool:
    is_permutation = binding is not None and binding.op == "relax.permute_dims"
    return is_permutation and permutation(binding.value) == _ROWS_BEFORE_HEADS


def _keeps_columns(binding: Binding) -> bool:
    """Whether a value's operator commutes with an exchange of the second and third axis."""
    call, last = binding.value, (_COLUMNS, -1)
    if not isinstance(binding.var.ty, TensorType) or len(shape(binding.var)) != len(_ROWS_BEFORE_HEADS):
        return False
    if binding.op == "relax.concat":
        return call.attrs.axis is not None and int(call.attrs.axis) in last
    if binding.op == "relax.strided_slice":
        return same_shape(shape(call)[:_COLUMNS], shape(call.args[0])[:_COLUMNS])
    return binding.op in POINTWISE


def _operands(call: Call) -> Iterator[Expr]:
    """The tensors that a call reads."""
    for arg in call.args:
        if _is_of_tensors(arg):
            yield from arg.fields
        elif _is_tensor(arg):
            yield arg


def _is_tensor(arg: Expr) -> bool:
    return isinstance(arg, Var | Constant) and isinstance(arg.ty, TensorType)


def _is_of_tensors(arg: Expr) -> bool:
    return isinstance(arg, Tuple) and all(map(_is_tensor, arg.fields))


def _is_of_all_heads(value: Expr) -> bool:
    """Whether an operand of a point-wise operator is broadcast along the heads."""
    extents = shape(value)
    return len(extents) < 3 or same(extents[-3], 1)


def _moved(call: Call, rows: dict[Var, Var], scope: BodyScope) -> Call:
    """The call on operands in the order rows before heads."""
    args = []
    for arg in call.args:
        if _is_of_tensors(arg):
            args.append(Tuple([_with_rows_outside(field, rows, scope) for field in arg.fields]))
        elif _is_tensor(arg):
            args.append(_with_rows_outside(arg, rows, scope))
        else:
            args.append(arg)
    return Call(call.op, args, call.attrs, call.ty_args)


def _with_rows_outside(value: Expr, rows: dict[Var, Var], scope: BodyScope) -> Expr:
    if isinstance(value, Var) and value in rows:
        return rows[value]
    extents = shape(value)
    if len(extents) < 2 or all(same(extent, 1) for extent in extents[-3:-1]):
        return value
    *batch, count, columns = [*[1] * (len(_ROWS_BEFORE_HEADS) - len(extents)), *extents]
    return scope.emit(op.reshape(value, [batch[0], count, 1, columns]))
