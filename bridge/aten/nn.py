"""Neural-network operators → Relax: normalization, dropout, embedding, draws.

Batch, group and weight normalization → plain arithmetic, with training's statistics and buffer updates.

Scaled dot-product attention → library functions, one for each of torch's fused kernels, or products and a softmax.
Where products are quicker they replace the efficient kernel (:func:`bridge.capture.attends_by_products`): dropout
follows the kernel's rule for draws, and rows without a visible key have the kernel's results.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import torch
from tvm import relax

from autodiff.body import const
from autodiff.dropout import keep_scale
from autodiff.extents import maximum, same_shape
from autodiff.ir import Expr, TensorType, Var, compute_type, dtype, numel, shape
from autodiff.library import LEARNED
from bridge.aten.activations import leaky_relu, with_derivative
from bridge.aten.any_operator import computed_from, whole
from bridge.aten.conv import lies_behind, read_from_behind
from bridge.aten.draws import draw_at_offset, state_before
from bridge.aten.reductions import euclidean_norm
from bridge.aten.registry import UnsupportedUse, converts, dims, numbers_only, rounds_once
from bridge.base.devices import HOST, current_device
from bridge.base.quirks import quirk
from bridge.base.torch_internals import aten
from bridge.capture import COMPUTED_DRAWS, STOP_GRADIENT, TensorMetadata, attends_by_products


def moments(importer, x, axes):
    """Mean and biased variance over ``axes`` (kept as extents of 1), the variance from centred values."""
    mean = importer.emit(op.mean(x, axis=axes, keepdims=True))
    centred = importer.emit(op.subtract(x, mean))
    variance = importer.emit(op.mean(importer.emit(op.multiply(centred, centred)), axis=axes, keepdims=True))
    return mean, centred, variance


def rstd_of(importer, variance, eps):
    return importer.emit(op.rsqrt(importer.emit(op.add(variance, importer.constant(eps, dtype(variance))))))


def affine(importer, x, weight, bias, target):
    """``x * weight + bias`` with both reshaped to ``target``; either may be ``None``."""
    if weight is not None:
        x = importer.emit(op.multiply(x, importer.reshape(weight, target)))
    return x if bias is None else importer.emit(op.add(x, importer.reshape(bias, target)))


@converts(aten._fused_rms_norm.default)
@rounds_once
def fused_rms_norm(importer, node, x, normalized_shape, weight=None, eps=None):
    """A GPU's ``x / sqrt(mean(x^2) + eps) * weight`` and its root; eps defaults to the computation type's epsilon."""
    axes = list(range(len(shape(x)) - len(normalized_shape), len(shape(x))))
    square = importer.emit(op.mean(importer.emit(op.multiply(x, x)), axis=axes, keepdims=True))
    eps = torch.finfo(getattr(torch, dtype(x))).eps if eps is None else eps
    rstd = rstd_of(importer, square, eps)
    return affine(importer, importer.emit(op.multiply(x, rstd)), weight, None, tuple(normalized_shape)), rstd


def _widen(importer, *tensors):
    """Half types cast to float32, as torch's kernels compute; ``None`` stays."""
    return [each if each is None else importer.cast(each, compute_type(dtype(each))) for each in tensors]


@converts(aten._native_batch_norm_legit_functional.default, aten._native_batch_norm_legit.no_stats)
def batch_norm_training(importer, node, x, weight, bias, *rest):
    """Batch statistics; the running statistics move towards them, the variance as the unbiased estimate."""
    *running, training, momentum, eps = rest
    element_type = dtype(x)
    x = read_from_behind(importer, x) if lies_behind(node.args[0]) else x
    x, weight, bias = _widen(importer, x, weight, bias)
    if not training:
        raise UnsupportedUse("batch normalization with running statistics in its training form")
    channels = shape(x)[1]
    per_channel = (1, channels, *[1] * (len(shape(x)) - 2))
    axes = [axis for axis in range(len(shape(x))) if axis != 1]
    count = numel(x) // maximum(channels, 1)
    mean, centred, variance = moments(importer, x, axes)
    rstd = rstd_of(importer, variance, eps)
    y = affine(importer, importer.emit(op.multiply(centred, rstd)), weight, bias, per_channel)
    y = importer.cast(y, element_type)
    saved = [importer.reshape(statistic, (channels,)) for statistic in (mean, rstd)]
    if not running:
        return y, *saved
    if count < 2:
        raise UnsupportedUse("batch normalization over one value per channel")
    unbiased = importer.emit(op.multiply(variance, importer.ratio(count, count - 1, dtype(x))))
    moved = [
        _moved(importer, old, importer.reshape(new, (channels,)), momentum)
        for old, new in zip(running, (mean, unbiased), strict=True)
    ]
    return y, *saved, *moved


def _moved(importer, running, batch, momentum):
    """``(1 - momentum) * running + momentum * batch``; the momentum may be a computed number."""
    stored = dtype(running)
    (running,) = _widen(importer, running)
    element_type = dtype(running)
    batch = importer.cast(importer.emit(op.grad.no_grad(batch)), element_type)
    if isinstance(momentum, int | float):
        share, rest = (importer.constant(value, element_type) for value in (momentum, 1 - momentum))
    else:
        share = importer.cast(momentum, element_type)
        rest = importer.emit(op.subtract(importer.constant(1, element_type), share))
    kept = importer.emit(op.multiply(running, rest))
    return importer.cast(importer.emit(op.add(kept, importer.emit(op.multiply(batch, share)))), stored)


@converts(aten._native_batch_norm_legit_no_training.default)
def batch_norm_inference(importer, node, x, weight, bias, running_mean, running_var, momentum, eps):
    element_type = dtype(x)
    x, weight, bias, running_mean, running_var = _widen(importer, x, weight, bias, running_mean, running_var)
    per_channel = (1, shape(x)[1], *[1] * (len(shape(x)) - 2))
    centred = importer.emit(op.subtract(x, importer.reshape(running_mean, per_channel)))
    rstd = importer.reshape(rstd_of(importer, running_var, eps), per_channel)
    y = affine(importer, importer.emit(op.multiply(centred, rstd)), weight, bias, per_channel)
    # on the processor, no statistics are saved: a GPU's results have other shapes, and are refused
    saved = [importer.emit(op.zeros((0,), dtype(running_mean))) for _ in range(2)]
    return importer.cast(y, element_type), *saved


@converts(aten.native_group_norm.default)
def native_group_norm(importer, node, x, weight, bias, batch, channels, pixels, groups, eps):
    element_type = dtype(x)
    behind = lies_behind(node.args[0])
    x, weight, bias = _widen(importer, read_from_behind(importer, x) if behind else x, weight, bias)
    if behind:  # no view has the elements of a group contiguous
        rows = importer.reshape(x, (batch, groups, shape(x)[1] // groups, *shape(x)[2:]))
        mean, centred, variance = moments(importer, rows, [2, 3, 4])
    else:
        rows = importer.reshape(x, (batch * groups, math.prod(shape(x)) // maximum(batch * groups, 1)))
        mean, centred, variance = moments(importer, rows, [1])
    rstd = rstd_of(importer, variance, eps)
    y = importer.reshape(importer.emit(op.multiply(centred, rstd)), shape(x))
    y = affine(importer, y, weight, bias, (1, channels, *[1] * (len(shape(x)) - 2)))
    y = importer.cast(y, element_type)
    return y, importer.reshape(mean, (batch, groups)), importer.reshape(rstd, (batch, groups))


@converts(aten._weight_norm_interface.default)
@rounds_once
def weight_norm(importer, node, v, g, dim=0):
    """``v`` rescaled to the norms ``g`` along all axes but ``dim``, and the norms of ``v``."""
    norm = euclidean_norm(importer, v, [axis for axis in range(len(shape(v))) if axis != dim], True)
    return importer.emit(op.multiply(v, importer.emit(op.divide(g, norm)))), norm


op = relax.op

_CLOSEST_SLOPES = 1e-5
"""Where the bounds of ``rrelu`` are 1e-6 apart or less, torch's backward takes their mean for the drawn slope."""


@converts(aten.native_dropout.default)
def native_dropout(importer, node, x, rate, train):
    if not train or rate == 0 or 0 in shape(x):
        return x, importer.filled(node.meta["val"][1], True)
    if rate == 1:  # eager multiplies by zero and draws nothing
        return importer.emit(op.multiply(x, importer.constant(0, dtype(x)))), importer.filled(
            node.meta["val"][1], False
        )
    index = importer.captured.names.draws.get(node.name)
    if index is None:
        raise UnsupportedUse("a dropout whose draw was not observed in eager")
    draw = importer.captured.draws[index]
    dropped = 1 - draw.args[0] if draw.operand is None else draw.args[0]
    if abs(dropped - rate) > 1e-12 or not same_shape(draw.shape, shape(x)):
        raise UnsupportedUse(f"dropout of rate {rate} where eager drops with probability {dropped}")
    if importer.draws.is_chained(index):  # an earlier draw is computed, so the mask cannot be drawn ahead
        mask = importer.draws.make(index, ())
        noise = importer.emit(op.multiply(importer.cast(mask, dtype(x)), const(keep_scale(rate, dtype(x)), x)))
        return importer.emit(op.multiply(x, noise)), importer.cast(mask, "bool")
    if draw.operand is not None:
        return _fused_dropout(importer, x, rate, index)
    importer.dropout_draws.append(index)
    pair = importer.emit(op.nn.dropout(x, rate))
    return importer.item(pair, 0), importer.cast(importer.item(pair, 1), "bool")


def _fused_dropout(importer, x, rate, index):
    """Dropout with eager's rounding: half types in float32, rounded once.

    Backward, eager multiplies by the rounded quotient ``1 / (1 - rate)``. Forward, a GPU's kernel takes the quotient of
    a rounded ``1 - rate``, the CPU's rounds it to the type of the result. For nearly all rates these are equal.
    """
    element_type = dtype(x)
    wide = importer.cast(x, compute_type(element_type))
    on_gpu = importer.captured.draws[index].device != HOST
    quotient = _rounded(1 / (1 - rate), dtype(wide))
    forward = keep_scale(rate, dtype(wide)) if on_gpu else _rounded(quotient, element_type)
    if forward == quotient == keep_scale(rate, dtype(wide)):
        importer.dropout_draws.append(index)
        pair = importer.emit(op.nn.dropout(wide, rate))
        return importer.cast(importer.item(pair, 0), element_type), importer.cast(importer.item(pair, 1), "bool")
    mask = importer.draw_params[index] = Var(f"draw_{index}", TensorType(shape(x), "bool"))
    noise = importer.cast(mask, dtype(wide))
    y, linear = (
        importer.emit(op.multiply(wide, importer.emit(op.multiply(noise, const(scale, wide)))))
        for scale in (forward, quotient)
    )
    return importer.cast(with_derivative(importer, y, linear), element_type), mask


def _rounded(value, element_type):
    return torch.tensor(value, dtype=getattr(torch, element_type)).item()


_FILLS = "cauchy exponential geometric log_normal normal_functional rand rand_like randint randint_like randn".split()


@converts(
    *(getattr(aten, name).default for name in (*_FILLS, "randn_like", "randperm", "uniform")),
    *(aten.bernoulli.p, aten.normal.float_float, aten.randint.low, aten.randint_like.low_dtype),
)
def draw(importer, node, *args, **kwargs):
    return importer.draw(node)


@converts(*COMPUTED_DRAWS)
def computed_draw(importer, node, *args, **kwargs):
    tensors = [arg for arg in args if isinstance(arg, Expr)]
    if node.target is aten.bernoulli.Tensor:  # the first is only filled
        tensors = tensors[1:]
    return importer.cast(_computed(importer, node, tensors), importer.out_dtype(node))


def _computed(importer, node, parameters):
    """A draw with these parameters, made inside the program by eager's operator; see :mod:`bridge.aten.draws`."""
    if node.name not in importer.captured.names.draws:
        raise UnsupportedUse("a random draw that was not observed in eager")
    index = importer.captured.names.draws[node.name]
    if importer.captured.draws[index].is_placed:
        return draw_at_offset(importer, node, parameters)
    return importer.draws.make(index, parameters)


@converts(aten.rrelu_with_noise_functional.default)
def rrelu(importer, node, x, slopes, lower=0.125, upper=1 / 3, training=False, generator=None):
    """Each element times its drawn slope, which is 1 where the element is positive."""
    if not training:
        return leaky_relu(importer, node, x, (lower + upper) / 2), slopes
    if upper - lower < _CLOSEST_SLOPES:
        raise UnsupportedUse("an rrelu whose bounds are closer than 1e-5: eager's derivative is that of leaky_relu")
    drawn = importer.cast(_computed(importer, node, [x]), dtype(x))
    return importer.emit(op.multiply(x, drawn)), drawn


@converts(aten.native_layer_norm.default)
def native_layer_norm(importer, node, x, normalized_shape, weight, bias, eps):
    """Half-precision rows with float32 weights, as autocast leaves them, are normalized in float32."""
    if any(each is not None and dtype(each) != dtype(x) for each in (weight, bias)):
        wide = [each if each is None else importer.cast(each, "float32") for each in (x, weight, bias)]
        y, mean, rstd = native_layer_norm(importer, node, wide[0], normalized_shape, wide[1], wide[2], eps)
        return importer.cast(y, dtype(x)), mean, rstd
    rank = len(normalized_shape)
    axes = list(range(len(shape(x)) - rank, len(shape(x))))
    gamma = relax.op.ones(normalized_shape, dtype(x)) if weight is None else weight
    beta = relax.op.zeros(normalized_shape, dtype(x)) if bias is None else bias
    has = {"scale": weight is not None, "center": bias is not None}
    y = importer.emit(op.nn.layer_norm(x, importer.emit(gamma), importer.emit(beta), axes, eps, **has))
    if {user.args[1] for user in node.users} <= {0}:
        return y, None, None
    mean, _, variance = moments(importer, x, axes)
    return y, mean, rstd_of(importer, variance, eps)


@converts(aten.embedding.default)
def embedding(importer, node, weight, indices, padding_idx=-1, scale_grad_by_freq=False, sparse=False):
    if sparse:
        raise UnsupportedUse("sparse gradients", "set sparse=False")
    args = [weight, indices, padding_idx, bool(scale_grad_by_freq)]
    return importer.library("embedding", args, importer.out(node))


_BAGS_UNSAVED = (torch.float32, torch.float16, torch.bfloat16)
"""Element types whose sums of bags have a kernel of their own on a CPU, which saves no bag of an index."""


def _of_bags(node, mode, padding):
    """Metadata of the results of ``_embedding_bag`` for operands in row-major order, as a program has them.

    For other orders, and without a gradient, eager's kernels save other tensors.
    """
    results = node.meta["val"]
    if current_device() != HOST:
        return results
    (count, width), indices = results[0].shape, node.args[1].meta["val"].shape
    is_unsaved = mode == 0 and padding < 0 and results[0].dtype in _BAGS_UNSAVED
    shapes = (count, width), (0,) if is_unsaved else indices, (count,), (count, width) if mode == 2 else (count,)
    return tuple(TensorMetadata(dims(each), result.dtype) for each, result in zip(shapes, results, strict=True))


@converts(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def embedding_bag(
    importer,
    node,
    weight,
    indices,
    offsets,
    scale_grad_by_freq=False,
    mode=0,
    sparse=False,
    factors=None,
    include_last_offset=False,
    padding_idx=-1,
):
    # the trace takes the variant without a gradient for all computed weights: only a placeholder surely needs none
    frozen = node.target is aten._embedding_bag_forward_only.default and node.args[0].op == "placeholder"
    if sparse and not frozen:
        raise UnsupportedUse("sparse gradients", "set sparse=False")
    args = (indices, offsets, scale_grad_by_freq, mode, False, factors, include_last_offset, padding_idx)
    if frozen:
        return whole(importer, node, weight, *args)
    meta = {**node.meta, "val": _of_bags(node, mode, padding_idx)}
    target = aten._embedding_bag.default
    with_gradient = SimpleNamespace(target=target, args=node.args, kwargs=node.kwargs, meta=meta)
    return whole(importer, with_gradient, weight, *args)


@converts(aten._assert_tensor_metadata.default)
def nothing(importer, node, *args, **kwargs):
    return None


@converts(aten._assert_async.msg)
def assert_async(importer, node, condition, message):
    importer.assertions.append((importer.cast(condition, "bool"), message))


_LOG2_E = 1.4426950408889634
"""log2(e): the efficient kernel multiplies scores by it, in float32, and raises 2 to the product."""
_ROWS = 32
"""The efficient kernel pads the rows of its logsumexp to a multiple of this."""


def _scale(q, given):
    """The factor of an attention's scores."""
    if given is None:
        numbers_only("attention", shape(q)[-1])
    return shape(q)[-1] ** -0.5 if given is None else given


@quirk(
    "F.scaled_dot_product_attention",
    reason="traced, the logsumexp of a CPU's kernel is float32 for inputs in float64",
    test="tests/bridge/library/test_attention.py",
    until="2.12",
)
@converts(aten._scaled_dot_product_flash_attention_for_cpu.default)
def flash_attention(importer, node, q, k, v, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
    if dropout_p:
        raise UnsupportedUse("flash attention with dropout")
    mask = [] if attn_mask is None else [attn_mask]
    scale = _scale(q, scale)
    args = [q, k, v, bool(mask), *mask, float(dropout_p), bool(is_causal), float(scale)]
    out, logsumexp = node.meta["val"]
    logsumexp = logsumexp.to(torch.promote_types(out.dtype, torch.float32))
    pair = importer.library("scaled_dot_product_flash_attention", args, (out, logsumexp))
    return importer.item(pair, 0), importer.item(pair, 1)


@converts(aten._scaled_dot_product_flash_attention.default)
def cuda_flash(importer, node, q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    return _attention(importer, node, "flash", q, k, v, None, dropout_p, is_causal, scale)


@converts(aten._scaled_dot_product_efficient_attention.default)
def cuda_efficient(importer, node, q, k, v, mask, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None):
    if _is_formula(importer, node, dropout_p):
        return _by_products(importer, node, q, k, v, mask, dropout_p, is_causal, scale), None
    return _attention(importer, node, "efficient", q, k, v, mask, dropout_p, is_causal, scale)


def _is_formula(importer, node, rate):
    """Whether products replace the kernel; with dropout, whether the eager run drew the mask of the products."""
    index = importer.captured.names.draws.get(node.name)
    if rate and index is not None:
        chosen = importer.captured.draws[index].is_attention_mask
    else:
        chosen = attends_by_products(node.target, *(each.meta["val"] for each in node.args[:3]))
    is_read = {user.args[1] for user in node.users} > {0}
    if chosen and is_read and rate:
        raise UnsupportedUse("the logsumexp of attention that drops", "call scaled_dot_product_attention")
    return chosen and not is_read


def _by_products(importer, node, q, k, v, mask, rate, is_causal, scale):
    """The kernel's formula. A row without a visible key is zero, and so are its gradients."""
    emit = importer.emit
    scale = _scale(q, scale)
    scores = emit(op.matmul(q, emit(op.permute_dims(k, [0, 1, 3, 2]))))
    scores = emit(op.multiply(scores, const(float(scale), scores)))
    if mask is not None:
        scores = emit(op.add(scores, mask))
    if is_causal:
        rows, columns = (emit(op.arange(0, extent, 1, "int64")) for extent in shape(scores)[2:])
        seen = emit(op.greater_equal(importer.reshape(rows, (shape(rows)[0], 1)), columns))
        scores = emit(op.where(seen, scores, importer.constant(float("-inf"), dtype(scores))))
    if mask is None:
        weights = emit(op.nn.softmax(scores, -1))
    else:
        low = emit(op.max(scores, axis=[-1], keepdims=True))  # the kernel's exponents are powers of 2, and overflow
        nothing, none = emit(op.multiply(low, const(_LOG2_E, low))), importer.constant(float("-inf"), dtype(low))
        nothing, zero = emit(op.equal(nothing, none)), importer.constant(0, dtype(low))
        weights = emit(op.nn.softmax(emit(op.where(nothing, zero, scores)), -1))
        weights = emit(op.where(nothing, zero, weights))
    if rate:
        weights = emit(op.multiply(weights, _noise(importer, node, weights, rate)))
    return emit(op.matmul(weights, v))


def _noise(importer, node, weights, rate):
    """The dropout factor: zero, or the reciprocal of the kept share, which the kernel rounds once."""
    index = importer.captured.names.draws[node.name]
    if importer.draws.is_chained(index):
        raise UnsupportedUse("dropout of attention behind a draw on the host whose distribution is computed")
    mask = importer.draw_params[index] = Var(f"draw_{index}", TensorType(shape(weights), "bool"))
    kept = 1 / (1 - float(np.float32(rate)))
    return importer.emit(op.multiply(importer.cast(mask, dtype(weights)), const(kept, weights)))


@converts(aten._scaled_dot_product_cudnn_attention.default)
def cuda_cudnn(importer, node, q, k, v, mask, compute_log_sumexp, dropout_p=0.0, is_causal=False, *_, scale=None):
    return _attention(importer, node, "cudnn", q, k, v, mask, dropout_p, is_causal, scale)


def _attention(importer, node, kernel, q, k, v, mask, dropout_p, is_causal, scale):
    """Output and logsumexp of one of CUDA's kernels; the trace reads none of its other results."""
    scale = _scale(q, scale)
    batch, heads, rows, _ = shape(q)
    sums = {"flash": (rows,), "efficient": (-(-rows // _ROWS) * _ROWS,), "cudnn": (rows, 1)}[kernel]
    out = TensorMetadata((batch, rows, heads, shape(v)[-1]), getattr(torch, dtype(q)))
    masks = [] if mask is None else [mask]
    has_mask = LEARNED if kernel == "efficient" and masks and _is_learned(importer, node.args[3]) else bool(masks)
    args = [kernel, q, k, v, has_mask, *masks, bool(is_causal), float(scale)]
    name = "attention"
    if dropout_p:
        state, advance = state_before(importer, node)
        name, args = "dropping_attention", [*args, float(dropout_p), advance, state]
    pair = importer.library(name, args, (out, TensorMetadata((batch, heads, *sums), torch.float32)))
    return importer.emit(op.permute_dims(importer.item(pair, 0), [0, 2, 1, 3])), importer.item(pair, 1)


def _is_learned(importer, mask):
    """Whether a mask may have a gradient: it is computed from a tensor that requires grad."""
    captured = importer.captured
    tensors = [*captured.module_tensors, *captured.given.tensors]

    def requires_grad(node):
        place = captured.names.placeholders.get(node.name) if node.op == "placeholder" else None
        return place is not None and tensors[place].requires_grad

    return computed_from(mask, requires_grad, lambda node: () if node.target is STOP_GRADIENT else node.all_input_nodes)
