"""Running a Relax function on torch tensors, and building small ones to run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import tvm
import tvm_ffi
from tvm import relax

from autodiff.ir import Constant, Expr, Function, IRModule, Var, build_function, dtype, shape
from autodiff.rewrite import Scope


def tensor_type(tensor: torch.Tensor) -> relax.TensorType:
    """The Relax type of a torch tensor."""
    return relax.TensorType(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def function(build: Callable, *args: torch.Tensor, names: Sequence[str] = ()) -> Function:
    """The function in flat form that ``build(scope, *params)`` describes; ``build`` returns one expression or a list.

    Parameters have the types of ``args`` and names ``p0``, ``p1``, ... or the given ones; results ``y0``, ``y1``, ...
    """
    names = list(names) or [f"p{index}" for index in range(len(args))]
    params = [relax.Var(name, tensor_type(arg)) for name, arg in zip(names, args, strict=True)]
    scope = Scope(names)
    outputs = build(scope, *params)
    outputs = outputs if isinstance(outputs, list) else [outputs]
    return build_function(params, scope.body, [_bound(out, f"y{i}", scope) for i, out in enumerate(outputs)])


def _bound(output: Expr, name: str, scope: Scope) -> Expr:
    return output if isinstance(output, Var | Constant) else scope.emit(output, name)


def evaluate(func: Function, *args: torch.Tensor) -> list[torch.Tensor]:
    """The results of a function in flat form, compiled for LLVM by TVM's default pipeline.

    ``library.*`` functions are computed by torch.
    """
    _bind_library()
    for param, arg in zip(func.params, args, strict=True):
        assert tensor_type(arg) == param.ty or (shape(param), dtype(param)) == (
            tuple(arg.shape),
            str(arg.dtype).removeprefix("torch."),
        ), f"{param.name}: wanted {param.ty}, got {tensor_type(arg)}"
    module = IRModule({"main": func.with_attr("global_symbol", "main")})
    machine = relax.VirtualMachine(tvm.compile(module, "llvm"), tvm.cpu())
    return list(machine["main"](*[arg.detach().contiguous() for arg in args]))


def _bind_library() -> None:
    for name, function_of_torch in LIBRARY.items():
        tvm_ffi.register_global_func(f"library.{name}", _on_torch(function_of_torch), override=True)


def _on_torch(function_of_torch: Callable) -> Callable:
    def call(*args):
        result = function_of_torch(*map(_to_torch, args))
        if isinstance(result, tuple):
            return tuple(value.contiguous() for value in result)
        return result.contiguous()

    return call


def _to_torch(arg):
    if isinstance(arg, tvm_ffi.core.Tensor):
        return torch.from_dlpack(arg)
    if isinstance(arg, tvm_ffi.Array):
        return [_to_torch(item) for item in arg]
    return arg


def _embedding(weight, indices, padding_idx, scale_grad_by_freq):
    return torch.ops.aten.embedding(weight, indices, padding_idx, bool(scale_grad_by_freq))


def _embedding_backward(grad, indices, num_weights, padding_idx, scale_grad_by_freq):
    return torch.ops.aten.embedding_dense_backward(grad, indices, num_weights, padding_idx, bool(scale_grad_by_freq))


def _attention(q, k, v, has_mask, *rest):
    *mask, dropout_p, is_causal, scale = rest
    assert len(mask) == has_mask
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, dropout_p, bool(is_causal), attn_mask=mask[0] if mask else None, scale=scale
    )


def _attention_backward(grad_out, q, k, v, out, logsumexp, has_mask, *rest):
    *mask, dropout_p, is_causal, scale = rest
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, q, k, v, out, logsumexp, dropout_p, bool(is_causal), attn_mask=mask[0] if mask else None, scale=scale
    )


def _convolution_backward(which: int):
    """The gradient of the input (0, given the weight) or of the weight (1, given the input), of a given shape."""

    def backward(grad, other, shape, stride, padding, dilation, output_padding, transposed, groups):
        missing = grad.new_empty(tuple(shape))
        pair = (missing, other) if which == 0 else (other, missing)
        geometry = (list(stride), list(padding), list(dilation), bool(transposed), list(output_padding), groups)
        mask = [which == 0, which == 1, False]
        return torch.ops.aten.convolution_backward(grad, *pair, None, *geometry, mask)[which]

    return backward


def _convolution(x, weight, stride, padding, dilation, output_padding, transposed, groups):
    geometry = (list(stride), list(padding), list(dilation), bool(transposed), list(output_padding), groups)
    return torch.ops.aten.convolution(x, weight, None, *geometry)


def _max_pool(x, kernel, stride, padding, dilation, ceil_mode):
    geometry = [list(value) for value in (kernel, stride, padding, dilation)]
    return torch.ops.aten.max_pool2d_with_indices(x, *geometry, bool(ceil_mode))


def _max_pool_backward(grad, positions, shape, kernel, stride, padding, dilation, ceil_mode):
    geometry = [list(value) for value in (kernel, stride, padding, dilation)]
    x = grad.new_empty(tuple(shape))
    return torch.ops.aten.max_pool2d_with_indices_backward(grad, x, *geometry, bool(ceil_mode), positions)


def _avg_pool(x, kernel, stride, padding, ceil_mode, count_include_pad, divisor):
    geometry = [list(value) for value in (kernel, stride, padding)]
    return torch.ops.aten.avg_pool2d(x, *geometry, bool(ceil_mode), bool(count_include_pad), divisor or None)


def _avg_pool_backward(grad, shape, kernel, stride, padding, ceil_mode, count_include_pad, divisor):
    geometry = [list(value) for value in (kernel, stride, padding)]
    flags = (bool(ceil_mode), bool(count_include_pad), divisor or None)
    return torch.ops.aten.avg_pool2d_backward(grad, grad.new_empty(tuple(shape)), *geometry, *flags)


def _at(dims, indices, rank):
    given = dict(zip(dims, indices, strict=True))
    return [given.get(dim) for dim in range(rank)]


def _index(x, dims, indices):
    return torch.ops.aten.index(x, _at(dims, indices, x.dim()))


def _index_backward(grad, shape, dims, indices):
    zeros = grad.new_zeros(tuple(shape))
    return torch.ops.aten.index_put(zeros, _at(dims, indices, zeros.dim()), grad, True)


LIBRARY = {
    "convolution": _convolution,
    "max_pool": _max_pool,
    "max_pool_backward": _max_pool_backward,
    "adaptive_max_pool": lambda x, size: torch.ops.aten.adaptive_max_pool2d(x, list(size)),
    "adaptive_max_pool_backward": lambda grad, positions, shape, size: torch.ops.aten.adaptive_max_pool2d_backward(
        grad, grad.new_empty(tuple(shape)), positions
    ),
    "avg_pool": _avg_pool,
    "avg_pool_backward": _avg_pool_backward,
    "adaptive_avg_pool": lambda x, size: torch.ops.aten._adaptive_avg_pool2d(x, list(size)),
    "adaptive_avg_pool_backward": lambda grad, shape, size: torch.ops.aten._adaptive_avg_pool2d_backward(
        grad, grad.new_empty(tuple(shape))
    ),
    "index": _index,
    "index_backward": _index_backward,
    "log1p": torch.log1p,
    "expm1": torch.expm1,
    "erfc": torch.erfc,
    "convolution_backward_input": _convolution_backward(0),
    "convolution_backward_weight": _convolution_backward(1),
    "embedding": _embedding,
    "embedding_backward": _embedding_backward,
    "scaled_dot_product_flash_attention": _attention,
    "scaled_dot_product_flash_attention_backward": _attention_backward,
}
