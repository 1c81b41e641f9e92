"""Reverse accumulation: bindings and a scalar -> the bindings of its backward, and the gradient of each variable.

The chain rule over the bindings, last to first: the gradient of a variable is complete when its own binding is reached,
and the operator's rule then adds to the gradients of the operands. The walk has the order of sums of TVM's ``Gradient``
pass, in time proportional to the bindings.

Undefined gradients: a library operator's derivative with gradients of zeros -> the same call without these gradients.
Autograd leaves the gradient of an unused result undefined, and the operator's formula omits its terms. That is more
than a saving: for a singular value decomposition with unused vectors, these terms are ``0 / 0`` where values repeat.
"""

from __future__ import annotations

from collections.abc import Iterable

from tvm import relax
from tvm.relax import op

from autodiff.body import Body, Scope, on_functions, rewrite
from autodiff.gradients.registry import partials
from autodiff.ir import (
    Call,
    Expr,
    Pairs,
    ShapeExpr,
    Tuple,
    TupleGetItem,
    TupleType,
    Var,
    dtype,
    library_name,
    op_name,
    shape,
)
from autodiff.library import call as library_call
from autodiff.typed import TypedBuilder


def accumulate(body: Pairs, scalar: Var) -> tuple[Pairs, dict[Var, Var]]:
    """The bindings of the backward, and the variable of each gradient by the variable it belongs to.

    Args:
        body: bindings in flat form; each call has a rule.
        scalar: the variable to differentiate, a floating point tensor without axes.
    """
    builder = relax.BlockBuilder()
    builder._begin_dataflow_block()  # collects the bindings that the rules emit
    gradients = _Gradients(builder, (part for pair in body for part in pair))
    try:
        gradients.add(scalar, op.ones(shape(scalar), dtype(scalar)))
        for var, value in reversed(body):
            if var in gradients.of:
                gradients.propagate(var, value)
    finally:
        block = builder._end_block()
    return [(binding.var, binding.value) for binding in block.bindings], gradients.of


class _Gradients:
    """The gradients so far, as variables of the backward; ``of``: variable -> the sum of its partial gradients."""

    def __init__(self, builder: relax.BlockBuilder, values: Iterable[Expr]):
        self.of: dict[Var, Var] = {}
        self._typed = TypedBuilder(builder, values)

    def propagate(self, var: Var, value: Expr) -> None:
        """Adds to the gradients of the operands of ``value``, once the gradient of ``var`` is complete."""
        gradient = self.of[var]
        if isinstance(value, Call):
            for arg, partial in partials(var, value, gradient, self._typed):
                if partial is not None:
                    self.add(arg, partial)
        elif isinstance(value, TupleGetItem):
            self._add_field(value, gradient)
        elif isinstance(value, Var | Tuple):
            self.add(value, gradient)

    def add(self, expr: Expr, partial: Expr) -> None:
        """Adds ``partial`` to an operand's gradient: a variable, a constant (ignored), or a tuple of both."""
        self._add(expr, _fields(self._typed.normalize(partial)))

    def _add(self, expr: Expr, partial: Expr | list) -> None:
        if isinstance(expr, Tuple):
            for field, part in zip(expr.fields, partial, strict=True):
                self._add(field, part)
        elif isinstance(expr, Var):
            value = self._typed.normalize(_joined(partial))
            known = self.of.get(expr)
            self.of[expr] = self._typed.emit(value if known is None else _sum(known, value))

    def _add_field(self, item: TupleGetItem, gradient: Var) -> None:
        """One field of a tuple's gradient; the other ones stay, or are zeros."""
        source = item.tuple_value
        known = self.of.get(source)
        if known is None:
            fields = [_zeros(field) for field in source.ty.fields]
            fields[item.index] = gradient
        else:
            fields = [TupleGetItem(known, index) for index in range(len(source.ty.fields))]
            fields[item.index] = _sum(fields[item.index], gradient)
        self.of[source] = self._typed.emit(Tuple(fields))


def _fields(value: Expr) -> Expr | list:
    """A tensor unchanged; a tuple's fields as a list, nested like the tuple."""
    if not isinstance(value.ty, TupleType):
        return value
    if isinstance(value, Tuple):
        return [_fields(field) for field in value.fields]
    return [_fields(TupleGetItem(value, index)) for index in range(len(value.ty.fields))]


def _joined(value: Expr | list) -> Expr:
    """A list of fields as a tuple; the variable itself if the fields are all of its fields in order."""
    if not isinstance(value, list):
        return value
    fields = [_joined(field) for field in value]
    if fields and all(isinstance(field, TupleGetItem) and field.index == i for i, field in enumerate(fields)):
        source = fields[0].tuple_value
        if all(field.tuple_value.same_as(source) for field in fields):
            return source
    return Tuple(fields)


def _sum(left: Expr, right: Expr) -> Expr:
    """``left + right``, field by field for tuples."""

    def add(a: Expr | list, b: Expr | list) -> Expr | list:
        if isinstance(a, list):
            return [add(x, y) for x, y in zip(a, b, strict=True)]
        return op.add(a, b)

    return _joined(add(_fields(left), _fields(right)))


def _zeros(ty: relax.Type) -> Expr:
    if isinstance(ty, TupleType):
        return Tuple([_zeros(field) for field in ty.fields])
    return op.zeros(ty.shape, str(ty.dtype))


_ZEROS = ("relax.zeros", "relax.zeros_like")


@on_functions
def undefined_gradients(body: Body, since: int = 0) -> None:
    """Drops the gradients of zeros from calls of ``library.operator_vjp``; a call without gradients becomes zeros.

    Safe: autograd computes the same, and the number is the same wherever the omitted terms are finite.
    """
    rewrite(body, _RULES, since)


def _defined_only(call: Call, scope: Scope) -> Expr | None:
    if library_name(call) != "library.operator_vjp":
        return None
    _, name, arguments, wanted, outputs, *rest = call.args
    indices = [int(index) for index in outputs.values]
    tensors, grads = rest[: len(rest) - len(indices)], rest[len(rest) - len(indices) :]
    defined = [
        (index, grad)
        for index, grad in zip(indices, grads, strict=True)
        if op_name(scope.definition(grad)) not in _ZEROS
    ]
    if len(defined) == len(indices):
        return None
    if not defined:
        return op.zeros(shape(call), dtype(call))
    left = ShapeExpr([index for index, _ in defined])
    return library_call(
        "operator_vjp", [name, arguments, wanted, left, *tensors, *(grad for _, grad in defined)], call.ty
    )


_RULES = {"relax.call_pure_packed": [_defined_only]}
