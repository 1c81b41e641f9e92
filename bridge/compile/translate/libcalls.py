"""Library steps: operators that torch's own kernels compute, most of them into a given tensor (``out=``).

Each function here translates a Relax operator or a library function (see :mod:`autodiff.library`) to
:class:`~bridge.compile.loop_ir.graph.LibraryCall` nodes. Transposed and sliced operands are passed as strided views.
"""

from __future__ import annotations

import torch

from autodiff.ir import Call, Expr, TensorType, Tuple, dtype, shape
from bridge.compile.loop_ir.graph import LibraryCall, Operand, Scalar, Value, whole
from bridge.compile.translate.builder import Builder, register

__all__: list[str] = []


def tensor(builder: Builder, expr: Expr) -> Operand:
    """The operand of a tensor argument; a literal becomes a tensor."""
    operand = builder.get(expr)
    return builder.dense(operand) if isinstance(operand, Scalar) else operand


def emit(builder: Builder, name: str, operands: list[Operand], outs: list[Value], run, **options) -> list[Operand]:
    builder.add(LibraryCall(name, tuple(operands), tuple(outs), run, **options))
    return [whole(out) for out in outs]


@register("relax.stack")
def _stack(builder: Builder, call: Call) -> Operand:
    operands = [tensor(builder, field) for field in _fields(builder, call.args[0])]
    axis = 0 if call.attrs.axis is None else int(call.attrs.axis)
    out = builder.fresh(shape(call), dtype(call))
    return emit(builder, "stack", operands, [out], lambda outs, args: torch.stack(args, axis, out=outs[0]))[0]


@register("relax.cumsum", "relax.cumprod")
def _scan(builder: Builder, call: Call) -> Operand:
    """An exclusive scan starts with the neutral element and leaves the last one out."""
    if call.attrs.axis is None:
        return NotImplemented
    function, neutral = (torch.cumsum, 0) if call.op.name == "relax.cumsum" else (torch.cumprod, 1)
    axis, kind = int(call.attrs.axis), getattr(torch, dtype(call))
    out = builder.fresh(shape(call), dtype(call))
    operands = [tensor(builder, call.args[0])]

    def inclusive(outs: list[torch.Tensor], args: list[torch.Tensor]) -> None:
        function(args[0], axis, dtype=kind, out=outs[0])

    def exclusive(outs: list[torch.Tensor], args: list[torch.Tensor]) -> None:
        count = args[0].shape[axis]
        if count:
            outs[0].narrow(axis, 0, 1).fill_(neutral)
            rest = function(args[0].narrow(axis, 0, count - 1), axis, dtype=kind)
            outs[0].narrow(axis, 1, count - 1).copy_(rest)

    run = exclusive if call.attrs.exclusive else inclusive
    return emit(builder, function.__name__, operands, [out], run)[0]


@register("relax.gather_elements")
def _gather_elements(builder: Builder, call: Call) -> Operand:
    axis = int(call.attrs.axis)
    x, index = tensor(builder, call.args[0]), builder.cast(tensor(builder, call.args[1]), "int64")
    out = builder.fresh(shape(call), dtype(call))
    return emit(
        builder, "gather", [x, index], [out], lambda outs, args: torch.gather(args[0], axis, args[1], out=outs[0])
    )[0]


@register("relax.scatter_elements")
def _scatter_elements(builder: Builder, call: Call) -> Operand:
    axis, reduction = int(call.attrs.axis), str(call.attrs.reduction)
    if reduction not in ("update", "add"):
        return NotImplemented
    x, index, source = (tensor(builder, arg) for arg in call.args)
    index = builder.cast(index, "int64")
    out = builder.fresh(shape(call), dtype(call))
    function = torch.scatter if reduction == "update" else torch.scatter_add
    return emit(
        builder,
        function.__name__,
        [x, index, source],
        [out],
        lambda outs, args: function(args[0], axis, args[1], args[2], out=outs[0]),
    )[0]


@register("relax.take")
def _take(builder: Builder, call: Call) -> Operand:
    """``torch.index_select``: an index outside of the tensor is torch's IndexError."""
    if call.attrs.axis is None or str(call.attrs.mode) not in ("fast", "raise"):
        return NotImplemented
    x = tensor(builder, call.args[0])
    if not isinstance(call.args[1].ty, TensorType):
        return NotImplemented
    index = tensor(builder, call.args[1])
    axis = int(call.attrs.axis) % len(x.shape)
    flat = builder.reshape(index, (index.view.numel,))
    out = builder.fresh((*x.shape[:axis], index.view.numel, *x.shape[axis + 1 :]), x.dtype)
    if index.dtype not in ("int32", "int64"):
        flat = builder.cast(flat, "int64")
    emit(
        builder,
        "index_select",
        [x, flat],
        [out],
        lambda outs, args: torch.index_select(args[0], axis, args[1], out=outs[0]),
    )
    return builder.reshape(whole(out), shape(call))


def _fields(builder: Builder, expr: Expr) -> list[Expr]:
    if isinstance(expr, Tuple):
        return list(expr.fields)
    raise NotImplementedError(f"wanted a literal tuple of tensors, got {expr}")
