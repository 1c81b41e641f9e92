"""Channels behind: what follows a convolution in channels_last -> the same on tensors whose channels are the last axis.

A convolution (a pool) gives its result in the order of memory that eager's has, and shows it with channels in the
second place (a ``permute_dims``). This pass moves that behind point-wise operators and reductions, which then walk
memory as it lies; between two convolutions nothing is left of it. So it does, once there is a backward, for the
gradients that convolutions and pools give: two branches of a network have theirs added where they meet.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm.relax import op

from autodiff.body import Binding, Body, on_functions
from autodiff.extents import same_shape
from autodiff.ir import Call, Constant, Expr, TensorType, TupleGetItem, Var, library_name, shape
from autodiff.ops import traits
from autodiff.rewrite import BodyScope

__all__ = ["channels_behind"]

_SOURCES = frozenset(
    f"library.{name}"
    for name in ("convolution_last", "max_pool_last", "convolution_last_backward_input", "max_pool_last_backward")
)
_REDUCTIONS = {f"relax.{name}": getattr(op, name) for name in ("sum", "mean", "max", "min", "prod")}


@on_functions
def channels_behind(body: Body) -> None:
    """``f(permute_dims(x))`` becomes ``permute_dims(f(x))`` for point-wise operators and reductions, where ``x`` comes
    from a convolution or a pool in channels_last.

    Safe: the same operator is applied to the same elements; a reduction adds them in another order.
    """
    if not any(library_name(each.value) in _SOURCES for each in body.bindings):
        return
    pass_ = _Pass(body)
    for binding in body.bindings:
        pass_.add(binding)
    body.finish(pass_.scope.bindings, {})
    body.prune()


class _Pass:
    """Attributes: ``moved``, of a variable: what it is a permutation of, and the axes of that."""

    def __init__(self, body: Body) -> None:
        self.body = body
        self.scope = BodyScope(body)
        self.moved: dict[Var, tuple[Var, tuple[int, ...]]] = {}

    def add(self, binding: Binding) -> None:
        """The binding, on operands in the order of memory if one of them has another."""
        value = binding.value
        if binding.op == "relax.permute_dims" and self._is_source(value.args[0]):
            self.moved[binding.var] = value.args[0], tuple(int(axis) for axis in value.attrs.axes)
        elif binding.op is not None and any(arg in self.moved for arg in value.args if isinstance(arg, Var)):
            if "elementwise" in traits(binding.op) and binding.op.startswith("relax."):
                self._pointwise(binding, value)
            elif binding.op in _REDUCTIONS and value.attrs.axis is not None:
                self._reduction(binding, value)
        self.scope.bindings.append(binding)

    def _is_source(self, value: Expr) -> bool:
        found = self.body.binding(value)
        if found is not None and isinstance(found.value, TupleGetItem):
            found = self.body.binding(found.value.tuple_value)
        return found is not None and found.value is not None and library_name(found.value) in _SOURCES

    def _pointwise(self, binding: Binding, call: Call) -> None:
        extents = shape(binding.var)
        axes = next((self.moved[arg][1] for arg in call.args if self._is_whole(arg, extents)), None)
        if axes is None:
            return
        args = [self._behind(arg, axes) for arg in call.args]
        made = self.scope.emit(Call(call.op, args, call.attrs, call.ty_args), f"{binding.name}_last")
        self._replace(binding, made, axes)

    def _is_whole(self, arg: Expr, extents: Sequence) -> bool:
        return isinstance(arg, Var) and arg in self.moved and same_shape(shape(arg), extents)

    def _behind(self, arg: Expr, axes: tuple[int, ...]) -> Expr:
        """An operand with its axes in the order of memory: as it lies, or as a view of it."""
        if isinstance(arg, Var) and arg in self.moved and self.moved[arg][1] == axes:
            return self.moved[arg][0]
        if not isinstance(arg, Var | Constant) or not isinstance(arg.ty, TensorType) or not shape(arg):
            return arg
        extents = [*[1] * (len(axes) - len(shape(arg))), *shape(arg)]
        if len(extents) > len(shape(arg)):
            arg = self.scope.emit(op.reshape(arg, extents))
        order = [axes.index(axis) for axis in range(len(axes))]
        wanted = [extents[axis] for axis in order]
        if sum(extent != 1 for extent in extents) <= 1:
            return self.scope.emit(op.reshape(arg, wanted))
        return self.scope.emit(op.permute_dims(arg, order))

    def _reduction(self, binding: Binding, call: Call) -> None:
        x, axes = self.moved[call.args[0]]
        reduced = [int(axis) % len(axes) for axis in call.attrs.axis]
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

    def _replace(self, binding: Binding, made: Var, axes: tuple[int, ...]) -> None:
        self.body.assign(binding, op.permute_dims(made, list(axes)))
        self.moved[binding.var] = made, axes
