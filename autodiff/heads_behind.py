"""Heads behind rows: what is computed from an attention's heads -> the same where rows lie outside of heads.

The fused kernels of attention read and write queries, keys and values as (batch, row, head, column), which is how a
projection makes them; forward shows them with heads outside (a ``permute_dims``) and may compute there, a rotary
embedding for instance. This pass moves the permutation behind that, to the call, which then reads memory as it lies.
"""

from __future__ import annotations

from collections.abc import Iterator

from tvm.relax import op

from autodiff.body import Binding, Body, on_functions
from autodiff.extents import same, same_shape
from autodiff.ir import Call, Constant, Expr, TensorType, Tuple, Var, library_name, permutation, shape
from autodiff.ops import POINTWISE
from autodiff.rewrite import BodyScope

__all__ = ["heads_behind"]

_ATTENTION = ("library.attention", "library.dropping_attention")
_OPERANDS = slice(2, 5)
"""Queries, keys and values among the arguments of the call, behind the function and the kernel's name."""

_ROWS_BEFORE_HEADS = [0, 2, 1, 3]
"""Its own inverse."""

_COLUMNS = 3


@on_functions
def heads_behind(body: Body) -> None:
    """``f(permute_dims(x, [0, 2, 1, 3]))`` becomes ``permute_dims(f(x), [0, 2, 1, 3])`` for point-wise operators,
    slices and concatenations of columns, where attention reads the result and all that it is computed from is
    permuted so, or the same for all heads.

    Safe: the same operators are applied to the same elements.
    """
    moves = _moves(body)
    if not moves:
        return
    scope = BodyScope(body)
    rows: dict[Var, Var] = {}
    for binding in body.bindings:
        if binding in moves:
            made = scope.emit(_moved(binding.value, rows, scope), f"{binding.name}_rows")
            rows[binding.var] = made
            body.assign(binding, op.permute_dims(made, _ROWS_BEFORE_HEADS))
        elif _is_permuted(binding):
            rows[binding.var] = binding.value.args[0]
        scope.bindings.append(binding)
        body.counts.rewrites += binding in moves
    body.finish(scope.bindings, {})
    body.prune()


def _moves(body: Body) -> set[Binding]:
    """The bindings between permutations and attention that can be computed with rows outside."""
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
    """Whether a value has an operator that does the same where two of the first three axes are exchanged."""
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
    """Whether an operand of a point-wise operator is broadcast along the heads, or along the rows and all before."""
    extents = shape(value)
    return len(extents) < 3 or same(extents[-3], 1)


def _moved(call: Call, rows: dict[Var, Var], scope: BodyScope) -> Call:
    """The call on operands with rows outside of heads."""
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
