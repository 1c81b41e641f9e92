"""Neural-network operators → Relax: normalization, dropout, embedding, draws."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import fx
from tvm import relax

from autodiff.body import const
from autodiff.dropout import keep_scale
from autodiff.ir import Expr, TensorType, Var, dtype, shape
from bridge.aten.activations import leaky_relu, with_derivative
from bridge.aten.dims import numbers_only, same_shape
from bridge.aten.draws import placed_draw
from bridge.aten.norm import moments, rstd_of
from bridge.aten.registry import UnsupportedUse, converts
from bridge.aten.whole import whole
from bridge.base.devices import HOST
from bridge.base.torch_fakes import fake_mode
from bridge.base.torch_internals import aten
from bridge.capture import COMPUTED_DRAWS, TensorForm

op = relax.op

_CLOSEST_SLOPES = 1e-5
"""Where the bounds of ``rrelu`` are 1e-6 apart or less, torch's backward takes their mean for what was drawn."""


@converts(aten.native_dropout.default)
def native_dropout(importer, node, x, rate, train):
    if not train or rate == 0 or 0 in shape(x):
        return x, importer.filled(node.meta["val"][1], True)
    if rate == 1:  # eager multiplies by zero and draws nothing
        return importer.emit(op.multiply(x, importer.constant(0, dtype(x)))), importer.filled(
            node.meta["val"][1], False
        )
    index = importer.captured.draw_of.get(node.name)
    if index is None:
        raise UnsupportedUse("a dropout whose draw was not observed in eager")
    draw = importer.captured.draws[index]
    dropped = 1 - draw.args[0] if draw.operand is None else draw.args[0]
    if abs(dropped - rate) > 1e-12 or not same_shape(draw.shape, shape(x)):
        raise UnsupportedUse(f"dropout of rate {rate} where eager drops with probability {dropped}")
    if importer.draws.is_chained(index):  # a draw before it is computed, so the mask cannot be drawn ahead
        mask = importer.draws.make(index, ())
        noise = importer.emit(op.multiply(importer.cast(mask, dtype(x)), const(keep_scale(rate, dtype(x)), x)))
        return importer.emit(op.multiply(x, noise)), importer.cast(mask, "bool")
    if draw.operand is not None:
        return _fused_dropout(importer, x, rate, index)
    importer.dropout_draws.append(index)
    pair = importer.emit(op.nn.dropout(x, rate))
    return importer.item(pair, 0), importer.item(pair, 1)


def _fused_dropout(importer, x, rate, index):
    """As eager's own operator: half types in float32, rounded once.

    Backward, it multiplies by the rounded quotient ``1 / (1 - rate)``. Forward, a GPU's takes that of a rounded
    ``1 - rate``, the CPU's one that is rounded to the type of the result. For nearly all rates these are one number.
    """
    element_type = dtype(x)
    wide = importer.cast(x, "float32") if element_type in ("float16", "bfloat16") else x
    on_gpu = importer.captured.draws[index].device != HOST
    quotient = _rounded(1 / (1 - rate), dtype(wide))
    forward = keep_scale(rate, dtype(wide)) if on_gpu else _rounded(quotient, element_type)
    if forward == quotient == keep_scale(rate, dtype(wide)):
        importer.dropout_draws.append(index)
        pair = importer.emit(op.nn.dropout(wide, rate))
        return importer.cast(importer.item(pair, 0), element_type), importer.item(pair, 1)
    mask = importer.draw_params[index] = Var(f"draw_{index}", TensorType(shape(x), "bool"))
    noise = importer.cast(mask, dtype(wide))
    y, linear = (
        importer.emit(op.multiply(wide, importer.emit(op.multiply(noise, const(scale, wide)))))
        for scale in (forward, quotient)
    )
    return importer.cast(with_derivative(importer, y, linear), element_type), mask


def _rounded(value, element_type):
    return torch.tensor(value, dtype=getattr(torch, element_type)).item()


@converts(
    aten.bernoulli.p,
    aten.cauchy.default,
    aten.exponential.default,
    aten.geometric.default,
    aten.log_normal.default,
    aten.normal.float_float,
    aten.normal_functional.default,
    aten.rand.default,
    aten.rand_like.default,
    aten.randint.default,
    aten.randint.low,
    aten.randint_like.default,
    aten.randint_like.low_dtype,
    aten.randn.default,
    aten.randn_like.default,
    aten.randperm.default,
    aten.uniform.default,
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
    """A draw with these parameters, made in its place by eager's operator; see :mod:`bridge.aten.draws`."""
    if node.name not in importer.captured.draw_of:
        raise UnsupportedUse("a random draw that was not observed in eager")
    index = importer.captured.draw_of[node.name]
    if importer.captured.draws[index].is_placed:
        return placed_draw(importer, node, parameters)
    return importer.draws.make(index, parameters)


@converts(aten.rrelu_with_noise_functional.default)
def rrelu(importer, node, x, slopes, lower=0.125, upper=1 / 3, training=False, generator=None):
    """Each element by the slope that was drawn for it, which is 1 where the element is positive."""
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


def _fake(form, mode):
    """A tensor without numbers, where sizes vary elsewhere."""
    if not isinstance(form, TensorForm):
        return form
    numbers_only("bags of computed weights", form.shape)
    with mode:
        return torch.empty(form.shape, dtype=form.dtype)


@converts(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def embedding_bag(importer, node, weight, indices, offsets, scale_grad_by_freq=False, mode=0, sparse=False, *rest):
    # the trace takes the form without a gradient for all computed weights: only a placeholder surely needs none
    frozen = node.target is aten._embedding_bag_forward_only.default and node.args[0].op == "placeholder"
    if sparse and not frozen:
        raise UnsupportedUse("sparse gradients", "set sparse=False")
    args = (indices, offsets, scale_grad_by_freq, mode, False, *rest)
    if frozen:
        return whole(importer, node, weight, *args)
    target = aten._embedding_bag.default
    if node.target is target:
        return whole(importer, node, weight, *args)
    numbers_only("bags of computed weights", [form.shape for form in node.meta["val"]])
    mode = fake_mode()
    fakes = target(*fx.node.map_arg(node.args, lambda arg: _fake(arg.meta["val"], mode)), **node.kwargs)
    meta = {**node.meta, "val": fakes}
    with_gradient = SimpleNamespace(target=target, args=node.args, kwargs=node.kwargs, meta=meta)
    return whole(importer, with_gradient, weight, *args)


@converts(aten._assert_tensor_metadata.default)
def nothing(importer, node, *args, **kwargs):
    return None


@converts(aten._assert_async.msg)
def assert_async(importer, node, condition, message):
    importer.assertions.append((importer.cast(condition, "bool"), message))
