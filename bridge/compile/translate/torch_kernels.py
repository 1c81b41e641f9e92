"""Library functions bound to torch's kernels, by the calling conventions of :mod:`autodiff.library`.

A kernel here is a function of decoded arguments: tensors, Python numbers and strings, lists of integers (shapes) and
lists of tensors (tuples). It returns the result, or a tuple of results, in memory of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from autodiff.ir import Call, Expr, ShapeExpr, TensorType, Tuple, TupleType, Var
from bridge.base.torch_internals import aten
from bridge.compile.loop_ir.graph import LibraryCall, Operand, Scalar, whole
from bridge.compile.translate.builder import Builder, number, register
from bridge.compile.translate.libcalls import tensor

__all__ = ["KERNELS"]

KERNELS: dict[str, Callable[..., Any]] = {}
_HAS_BIASES = 5  # among the options of aten.mkldnn_rnn_layer


def kernel(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Binds ``library.<name>``."""

    def bind(function: Callable[..., Any]) -> Callable[..., Any]:
        KERNELS[name] = function
        register(f"library.{name}")(lambda builder, call: _translate(builder, call, name, function))
        return function

    return bind


def _translate(builder: Builder, call: Call, name: str, function: Callable[..., Any]) -> Operand | list[Operand]:
    operands: list[Operand] = []
    decoders = [_decoder(builder, arg, operands) for arg in call.args[1:]]
    types = call.ty.fields if isinstance(call.ty, TupleType) else [call.ty]
    outs = [builder.fresh(tuple(int(extent) for extent in ty.shape), str(ty.dtype)) for ty in types]

    def run(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        made = function(*[decode(tensors) for decode in decoders])
        made = made if isinstance(made, tuple) else (made,)
        return [_own(value, tensors) for value in made]

    builder.add(LibraryCall(name, tuple(operands), tuple(outs), run, allocates=True))
    results = [whole(out) for out in outs]
    return results if isinstance(call.ty, TupleType) else results[0]


def _own(value: torch.Tensor, inputs: list[torch.Tensor]) -> torch.Tensor:
    """Dense memory that is no input's."""
    if any(value is given for given in inputs):
        return value.clone(memory_format=torch.contiguous_format)
    return value.contiguous()


def _decoder(builder: Builder, arg: Expr, operands: list[Operand]) -> Callable[[list[torch.Tensor]], Any]:
    """Reads one argument at run time; tensors are taken from the list that the step is called with."""
    if (isinstance(arg, Var) and isinstance(arg.ty, TupleType)) or isinstance(arg, Tuple):
        fields = [builder.dense(f) if isinstance(f, Scalar) else f for f in builder.get(arg)]
        first = len(operands)
        operands.extend(fields)
        return lambda tensors: tensors[first : first + len(fields)]
    if isinstance(arg.ty, TensorType):
        position = len(operands)
        operands.append(tensor(builder, arg))
        return lambda tensors: tensors[position]
    value = _literal(arg)
    return lambda tensors: value


def _literal(arg: Expr) -> Any:
    if isinstance(arg, ShapeExpr):
        return [int(extent) for extent in arg.values]
    if hasattr(arg, "value") and isinstance(arg.value, str):
        return arg.value
    return number(arg)


@kernel("embedding")
def embedding(weight, indices, padding_idx, scale_grad_by_freq):
    return aten.embedding(weight, indices, padding_idx, bool(scale_grad_by_freq))


@kernel("embedding_backward")
def embedding_backward(grad, indices, num_weights, padding_idx, scale_grad_by_freq):
    return aten.embedding_dense_backward(grad, indices, num_weights, padding_idx, bool(scale_grad_by_freq))


def _attention_mask(has_mask: int, rest: tuple) -> tuple[torch.Tensor | None, tuple]:
    return (rest[0], rest[1:]) if has_mask else (None, rest)


@kernel("scaled_dot_product_flash_attention")
def flash_attention(q, k, v, has_mask, *rest):
    mask, (dropout_p, is_causal, scale) = _attention_mask(has_mask, rest)
    return aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, dropout_p, bool(is_causal), attn_mask=mask, scale=scale
    )


@kernel("scaled_dot_product_flash_attention_backward")
def flash_attention_backward(grad_out, q, k, v, out, logsumexp, has_mask, *rest):
    mask, (dropout_p, is_causal, scale) = _attention_mask(has_mask, rest)
    # the kernel wants out in the layout that the forward made it in: (batch, row, head, column)
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, q, k, v, out, logsumexp, dropout_p, bool(is_causal), attn_mask=mask, scale=scale
    )


@kernel("convolution")
def convolution(x, weight, stride, padding, dilation, output_padding, transposed, groups):
    return aten.convolution(x, weight, None, stride, padding, dilation, bool(transposed), output_padding, groups)


def _convolution_backward(grad, x, weight, geometry, wanted):
    stride, padding, dilation, output_padding, transposed, groups = geometry
    options = [stride, padding, dilation, bool(transposed), output_padding, groups]
    return aten.convolution_backward(grad, x, weight, None, *options, wanted)


@kernel("convolution_backward_input")
def convolution_backward_input(grad, weight, extents, *geometry):
    x = grad.new_empty(1).expand(extents)  # only its shape is read
    return _convolution_backward(grad, x, weight, geometry, [True, False, False])[0]


@kernel("convolution_backward_weight")
def convolution_backward_weight(grad, x, extents, *geometry):
    weight = grad.new_empty(1).expand(extents)  # only its shape is read
    return _convolution_backward(grad, x, weight, geometry, [False, True, False])[1]


@kernel("max_pool")
def max_pool(x, kernel_size, stride, padding, dilation, ceil_mode):
    pool = aten.max_pool2d_with_indices if len(kernel_size) == 2 else aten.max_pool3d_with_indices
    return pool(x, kernel_size, stride, padding, dilation, bool(ceil_mode))


@kernel("max_pool_backward")
def max_pool_backward(grad, positions, extents, kernel_size, stride, padding, dilation, ceil_mode):
    rank = len(kernel_size)
    pool = aten.max_pool2d_with_indices_backward if rank == 2 else aten.max_pool3d_with_indices_backward
    x = grad.new_empty(1).expand(extents)
    return pool(grad, x, kernel_size, stride, padding, dilation, bool(ceil_mode), positions)


@kernel("adaptive_max_pool")
def adaptive_max_pool(x, output_size):
    return (aten.adaptive_max_pool2d if len(output_size) == 2 else aten.adaptive_max_pool3d)(x, output_size)


@kernel("adaptive_max_pool_backward")
def adaptive_max_pool_backward(grad, positions, extents, output_size):
    rank = len(output_size)
    pool = aten.adaptive_max_pool2d_backward if rank == 2 else aten.adaptive_max_pool3d_backward
    return pool(grad, grad.new_empty(1).expand(extents), positions)


@kernel("avg_pool")
def avg_pool(x, kernel_size, stride, padding, ceil_mode, include_pad, divisor):
    pool = aten.avg_pool2d if len(kernel_size) == 2 else aten.avg_pool3d
    return pool(x, kernel_size, stride, padding, bool(ceil_mode), bool(include_pad), divisor or None)


@kernel("avg_pool_backward")
def avg_pool_backward(grad, extents, kernel_size, stride, padding, ceil_mode, include_pad, divisor):
    pool = aten.avg_pool2d_backward if len(kernel_size) == 2 else aten.avg_pool3d_backward
    x = grad.new_empty(1).expand(extents)
    return pool(grad, x, kernel_size, stride, padding, bool(ceil_mode), bool(include_pad), divisor or None)


@kernel("adaptive_avg_pool")
def adaptive_avg_pool(x, output_size):
    return (aten._adaptive_avg_pool2d if len(output_size) == 2 else aten._adaptive_avg_pool3d)(x, output_size)


@kernel("adaptive_avg_pool_backward")
def adaptive_avg_pool_backward(grad, extents, output_size):
    rank = len(output_size)
    pool = aten._adaptive_avg_pool2d_backward if rank == 2 else aten._adaptive_avg_pool3d_backward
    return pool(grad, grad.new_empty(1).expand(extents))


def _at(rank: int, dims: list[int], indices: list[torch.Tensor]) -> list[torch.Tensor | None]:
    places: list[torch.Tensor | None] = [None] * rank
    for dim, index in zip(dims, indices, strict=True):
        places[dim] = index
    return places


@kernel("index")
def index(x, dims, indices):
    return aten.index.Tensor(x, _at(x.dim(), dims, indices))


@kernel("index_backward")
def index_backward(grad, extents, dims, indices):
    zeros = grad.new_zeros(extents)
    return aten.index_put_(zeros, _at(len(extents), dims, indices), grad, True)


@kernel("index_put")
def index_put(x, values, dims, indices, accumulate):
    return aten.index_put(x, _at(x.dim(), dims, indices), values, bool(accumulate))


@kernel("sort")
def sort(x, axis, descending, stable):
    return tuple(torch.sort(x, dim=axis, descending=bool(descending), stable=bool(stable)))


@kernel("topk")
def topk(x, axis, k, largest, sorted_):
    return tuple(torch.topk(x, k, axis, bool(largest), bool(sorted_)))


@kernel("kthvalue")
def kthvalue(x, axis, k):
    return tuple(torch.kthvalue(x, k, axis, keepdim=True))


@kernel("cummax")
def cummax(x, axis):
    return tuple(torch.cummax(x, axis))


@kernel("cummin")
def cummin(x, axis):
    return tuple(torch.cummin(x, axis))


def _along(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, axis: tuple(function(x, axis, keepdim=True))


for _name in ("max", "min", "median", "nanmedian", "mode"):
    kernel(f"{_name}_dim")(_along(getattr(torch, _name)))
for _name in ("erfc", "atan2", "fmod", "remainder"):
    kernel(_name)(getattr(torch, _name))


@kernel("divide_floor")
def divide_floor(a, b):
    return torch.div(a, b, rounding_mode="floor")


@kernel("divide_trunc")
def divide_trunc(a, b):
    return torch.div(a, b, rounding_mode="trunc")


@kernel("binary_cross_entropy")
def binary_cross_entropy(x, target):
    return aten.binary_cross_entropy(x, target, None, 0)


def _upsampling(mode: str, direction: str, align_corners: int, scales: tuple[float, ...]) -> tuple[Any, list[Any]]:
    """The operator, and the options behind the sizes: ``align_corners`` but for nearest, then one scale per axis."""
    prefix = "_" if "exact" in mode or mode.endswith("aa") else ""
    operator = getattr(aten, f"{prefix}upsample_{mode}{direction}").default
    given = [scale or None for scale in scales]
    return operator, given if mode.startswith("nearest") else [bool(align_corners), *given]


@kernel("upsample")
def upsample(x, mode, output_size, align_corners, *scales):
    operator, options = _upsampling(mode, "", align_corners, scales)
    return operator(x, output_size, *options)


@kernel("upsample_backward")
def upsample_backward(grad, extents, mode, output_size, align_corners, *scales):
    operator, options = _upsampling(mode, "_backward", align_corners, scales)
    return operator(grad, output_size, extents, *options)


@kernel("recurrent_layer")
def recurrent_layer(options, *tensors):
    return tuple(aten.mkldnn_rnn_layer(*(tensor.contiguous() for tensor in tensors), *json.loads(options))[:3])


@kernel("recurrent_layer_backward")
def recurrent_layer_backward(options, *tensors_and_grads):
    tensors, grads = tensors_and_grads[:-3], tensors_and_grads[-3:]
    options = json.loads(options)
    leaves = [tensor.detach().contiguous() for tensor in tensors]
    # without biases, the library's gradients of the zeros in their place do not have those zeros' shape
    wanted = leaves if options[_HAS_BIASES] else [*leaves[:3], *leaves[5:]]
    for leaf in wanted:
        leaf.requires_grad_()
    with torch.enable_grad():
        made = aten.mkldnn_rnn_layer(*leaves, *options)[:3]
        found = iter(torch.autograd.grad(made, wanted, grads))
    return tuple(next(found) if leaf.requires_grad else torch.zeros_like(leaf) for leaf in leaves)


def _operator(name: str, arguments: str, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Runs an ATen operator on arguments written as JSON (see :mod:`autodiff.library`)."""
    namespace, packet, overload = name.split(".")
    target = getattr(getattr(getattr(torch.ops, namespace), packet), overload)

    def read(value: Any) -> Any:
        if isinstance(value, list):
            return [read(item) for item in value]
        if not isinstance(value, dict):
            return value
        if "$tensor" in value:
            return tensors[value["$tensor"]]
        if "$dtype" in value:
            return getattr(torch, value["$dtype"])
        return {key: read(item) for key, item in value.items()}

    args, kwargs = read(json.loads(arguments))
    made = target(*args, **kwargs)
    return tuple(made) if isinstance(made, tuple | list) else (made,)


@kernel("operator")
def operator(name, arguments, *tensors):
    return _operator(name, arguments, tensors)


@kernel("operator_vjp")
def operator_vjp(name, arguments, wanted, outputs, *tensors_and_grads):
    count = len(tensors_and_grads) - len(outputs)
    grads = tensors_and_grads[count:]
    tensors = [tensor.detach() for tensor in tensors_and_grads[:count]]
    with torch.enable_grad():
        target = tensors[wanted].requires_grad_()
        made = _operator(name, arguments, tuple(tensors))
        pairs = [(made[index], grad) for index, grad in zip(outputs, grads, strict=True) if made[index].requires_grad]
        if not pairs:
            return torch.zeros_like(target)
        (partial,) = torch.autograd.grad(
            [value for value, _ in pairs], [target], [grad for _, grad in pairs], allow_unused=True
        )
    return torch.zeros_like(target) if partial is None else partial


@kernel("checked")
def checked(x, condition, message):
    if not bool(condition):
        raise RuntimeError(message)
    return x
