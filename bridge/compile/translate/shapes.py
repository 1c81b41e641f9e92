"""Shape operators → another view of the same value; nothing is computed."""

from __future__ import annotations

from autodiff.ir import Call, Constant, dtype, extents_of, numpy_value, shape
from bridge.compile.loop_ir.graph import Operand, Scalar
from bridge.compile.translate.builder import Builder
from bridge.compile.translate.registry import numbers, register

__all__: list[str] = []

_END = 2**62
"""From here on the end of a slice means that of the tensor, whatever its size."""


@register("relax.reshape", "relax.flatten", "relax.squeeze", "relax.expand_dims", "relax.nn.batch_flatten")
def _reshape(builder: Builder, call: Call) -> Operand | Scalar:
    return builder.reshape(builder.get(call.args[0]), shape(call))


@register("relax.permute_dims")
def _permute_dims(builder: Builder, call: Call) -> Operand | Scalar:
    axes = None if call.attrs.axes is None else [int(axis) for axis in call.attrs.axes]
    return builder.permute(builder.get(call.args[0]), axes)


@register("relax.broadcast_to")
def _broadcast_to(builder: Builder, call: Call) -> Operand | Scalar:
    return builder.broadcast(builder.get(call.args[0]), shape(call))


@register("relax.strided_slice")
def _strided_slice(builder: Builder, call: Call) -> Operand | Scalar:
    axes, begin, end = (numbers(arg) for arg in call.args[1:4])
    steps = numbers(call.args[4]) if len(call.args) > 4 else [1] * len(axes)
    if min(steps, default=1) < 1:
        return NotImplemented
    result = builder.get(call.args[0])
    for axis, first, last, step in zip(axes, begin, end, steps, strict=True):
        extent = result.shape[axis]
        last = extent if isinstance(last, int) and last >= _END else last
        first, last = (min(max(at + extent if at < 0 else at, 0), extent) for at in (first, last))
        result = builder.slice(result, axis, first, last, step)
    return result


@register("relax.split")
def _split(builder: Builder, call: Call) -> list:
    operand = builder.get(call.args[0])
    axis = int(call.attrs.axis)
    results, begin = [], 0
    for field in call.ty.fields:
        end = begin + extents_of(field)[axis]
        results.append(builder.slice(operand, axis, begin, end))
        begin = end
    return results


@register("relax.zeros", "relax.zeros_like")
def _zeros(builder: Builder, call: Call) -> Scalar:
    return Scalar(0, dtype(call), shape(call))


@register("relax.ones", "relax.ones_like")
def _ones(builder: Builder, call: Call) -> Scalar:
    return Scalar(1, dtype(call), shape(call))


@register("relax.full", "relax.full_like")
def _full(builder: Builder, call: Call) -> Operand | Scalar:
    fill = call.args[1]
    if isinstance(fill, Constant) and numpy_value(fill).size == 1:
        return builder.cast(builder.expand(builder.get(fill), shape(call)), dtype(call))
    return builder.expand(builder.cast(builder.get(fill), dtype(call)), shape(call))


@register("relax.stop_lift_params", "relax.builtin.stop_lift_params")
def _identity(builder: Builder, call: Call) -> Operand | Scalar:
    return builder.get(call.args[0])


@register("relax.grad.no_grad", "relax.grad.start_checkpoint", "relax.grad.end_checkpoint")
def _marker(builder: Builder, call: Call) -> Operand | Scalar:
    return builder.get(call.args[0])


@register("library.with_derivative")
def _with_derivative(builder: Builder, call: Call) -> Operand | Scalar:
    """What is not differentiated has the value alone."""
    return builder.get(call.args[1])
