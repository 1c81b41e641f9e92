"""Shape operators, concatenations, products, scans and drawn masks → layout-agnostic nodes.

Recomputed dropout masks: the generator's state, as a parameter in place of a mask → a point-wise node. The mask of
eager's fused dropouts follows from the generator's seed and offset (:mod:`bridge.compile.codegen.philox`). Each
generated kernel that reads the mask recomputes it, forward and backward; the mask is in memory only for other kernels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from autodiff.extents import Dim, Extent
from autodiff.ir import Call, Constant, Tuple, TupleType, dtype, extents_of, library_name, numpy_value, shape
from autodiff.library import GENERATOR_STATE
from autodiff.scan import scan_of
from bridge.compile.codegen.philox import threshold
from bridge.compile.loop_ir.graph import Join, LoopCall, MatMul, Operand, Scalar, Value, whole
from bridge.compile.loop_ir.views import View
from bridge.compile.passes.choose_layouts import is_profitable_to_join
from bridge.compile.translate.builder import Builder, numbers, register
from bridge.compile.translate.libcalls import emit, tensor

__all__ = ["DrawnMask", "drawn_mask", "state_parameter"]

_END = 2**62
"""A slice that ends here or beyond ends at the tensor's end, whatever the tensor's size."""


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


@register("relax.grad.no_grad", "library.overwritten")
def _marker(builder: Builder, call: Call) -> Operand | Scalar:
    return builder.get(call.args[1] if library_name(call) else call.args[0])


@register("library.with_derivative")
def _with_derivative(builder: Builder, call: Call) -> Operand | Scalar:
    """Only the value: the given derivative matters to differentiation alone."""
    return builder.get(call.args[1])


@register("relax.concat")
def _concat(builder: Builder, call: Call) -> Operand:
    field = call.args[0]
    many = isinstance(field, Tuple) or isinstance(field.ty, TupleType)
    operands = builder.get(field) if many else [builder.get(field)]
    if len({operand.dtype for operand in operands}) > 1:
        return NotImplemented
    axis = 0 if call.attrs.axis is None else int(call.attrs.axis) % len(shape(call))
    return _join(builder, operands, axis, shape(call))


@register("relax.nn.pad")
def _pad(builder: Builder, call: Call) -> Operand:
    """By concatenation in a generated kernel; for several axes, or where that does not pay, by torch's copy."""
    x = builder.get(call.args[0])
    widths = [int(width) for width in call.attrs.pad_width]
    axes = [axis for axis in range(len(x.shape)) if any(widths[2 * axis : 2 * axis + 2])]
    symbolic = any(isinstance(extent, Extent) for extent in x.shape)
    if str(call.attrs.pad_mode) != "constant" or min(widths) < 0:
        return NotImplemented
    fill = float(call.attrs.pad_value)
    number = fill if "float" in x.dtype else int(fill)
    if not symbolic and len(axes) > 1:
        return _copied(builder, call, widths, number)
    for axis in axes:
        operands: list[Operand | Scalar] = [x]
        for width, place in ((widths[2 * axis], 0), (widths[2 * axis + 1], 2)):
            if width:
                extents = (*x.shape[:axis], width, *x.shape[axis + 1 :])
                operands.insert(place, Scalar(number, x.dtype, extents))
        if not symbolic and not is_profitable_to_join(operands, axis, builder.rules):
            return _copied(builder, call, widths, number)
        extent = sum(widths[2 * axis : 2 * axis + 2]) + x.shape[axis]
        x = _join(builder, operands, axis, (*x.shape[:axis], extent, *x.shape[axis + 1 :]))
    return x


def _copied(builder: Builder, call: Call, widths: Sequence[int], number: float) -> Operand:
    """Copies the operand into a tensor that is filled with ``number``."""
    return emit(builder, call, "pad", [tensor(builder, call.args[0])], tuple(widths[::2]), number)


def _join(builder: Builder, operands: Sequence[Operand | Scalar], axis: int, extents: Sequence[Dim]) -> Operand:
    out = builder.fresh(extents, operands[0].dtype)
    builder.add(Join(tuple(operands), axis, out))
    return whole(out)


@register("relax.matmul")
def _matmul(builder: Builder, call: Call) -> Operand:
    """``NotImplemented`` for types without a torch product."""
    result = dtype(call)
    if result == "bool" or result.startswith("uint"):
        return NotImplemented
    a, b = (builder.cast(tensor(builder, arg), result) for arg in call.args)
    out = builder.fresh(shape(call), result)
    builder.add(MatMul(a, b, out))
    return whole(out)


@register("library.matmul_bias")
def _matmul_bias(builder: Builder, call: Call) -> Operand:
    a, b, bias = (tensor(builder, arg) for arg in call.args[1:4])
    out = builder.fresh((a.shape[0], b.shape[1]), dtype(call))
    builder.add(MatMul(a, b, out, bias))
    return builder.reshape(whole(out), shape(call))


@register("library.scan")
def _scan(builder: Builder, call: Call) -> list[Operand]:
    scan, tensors = scan_of(call)
    operands = tuple(builder.dense(tensor(builder, each)) for each in tensors)
    outs = tuple(builder.fresh(extents_of(ty), str(ty.dtype)) for ty in call.ty.fields)
    builder.add(LoopCall("loop", operands, outs, scan=dataclasses.replace(scan, gradient=None)))
    return [whole(out) for out in outs]


@dataclass(frozen=True)
class DrawnMask:
    """The parameters of one dropout mask that eager draws.

    Attributes:
        rate: the probability of a zero.
        width: elements per load of eager's threads, of :data:`bridge.compile.codegen.philox.WIDTHS`.
        threads: of eager's launch; attention's mask does not depend on it.
    """

    rate: float
    width: int
    threads: Dim


def state_parameter(name: str) -> Value:
    """The generator's state as a parameter: on the host for the caller, on the device for a kernel."""
    return Value(name, *GENERATOR_STATE, "param")


def drawn_mask(builder: Builder, mask: DrawnMask, state: Value, extents: Sequence[Dim]) -> Operand:
    """The mask of a dense tensor of these extents, from the generator's state; made at its first use."""
    every = (0,) * len(extents)
    seed, offset = (Operand(state, View(tuple(extents), every, place)) for place in range(2))
    index = whole(Value(f"{state.name}_index", tuple(extents), "int64", "index"))
    numbers = Scalar(mask.threads, "int64"), Scalar(threshold(mask.rate, mask.width), "int64")
    return builder.pointwise(f"dropout_mask_{mask.width}", [index, seed, offset, *numbers], "bool")
