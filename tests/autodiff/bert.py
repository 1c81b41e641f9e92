"""A BERT layer in Relax and in torch, for tests of the whole pipeline."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from tvm import relax
from tvm.relax import op

from autodiff.body import Scope
from autodiff.ir import Function, Var, shape
from tests.autodiff.evaluate import function

BATCH, LENGTH, HEADS, HIDDEN, WIDE = 2, 5, 2, 8, 16
RATE, EPSILON = 0.1, 1e-12

NAMES = ["x", "bias", *(f"{p}_{k}" for p in ("q", "k", "v", "o", "up", "down") for k in ("weight", "bias"))]
NAMES += ["gamma_1", "beta_1", "gamma_2", "beta_2"]


def arguments(dtype: torch.dtype) -> list[torch.Tensor]:
    """Input, additive attention mask, then weights and biases, in the order of ``NAMES``."""
    generator = torch.Generator().manual_seed(0)

    def draw(*extents):
        return torch.randn(*extents, generator=generator, dtype=torch.float64).to(dtype)

    shapes = [(HIDDEN, HIDDEN)] * 4 + [(WIDE, HIDDEN), (HIDDEN, WIDE)]
    weights = [tensor for rows, columns in shapes for tensor in (draw(rows, columns) / columns**0.5, draw(rows))]
    norms = [1 + 0.1 * draw(HIDDEN), draw(HIDDEN), 1 + 0.1 * draw(HIDDEN), draw(HIDDEN)]
    bias = torch.zeros(BATCH, 1, 1, LENGTH, dtype=dtype)
    bias[1, ..., -2:] = -10000.0
    return [draw(BATCH, LENGTH, HIDDEN), bias, *weights, *norms]


def relax_layer(args: list[torch.Tensor], layers: int = 1) -> Function:
    """``layers`` layers on one set of weights, with ``nn.dropout``, ``nn.layer_norm`` and ``nn.gelu``."""
    return function(layers_of(layers), *args, names=NAMES)


def layers_of(layers: int) -> Callable:
    """A function that builds so many layers, for any batch and length."""

    def build(scope: Scope, *params: Var):
        named = dict(zip(NAMES, params, strict=True))
        x = named["x"]
        for _ in range(layers):
            x = _layer(x, named, scope)
        return x

    return build


def _layer(x: Var, named: dict[str, Var], scope: Scope) -> Var:
    emit = scope.emit

    def linear(value, name):
        weight = emit(op.permute_dims(named[f"{name}_weight"]), f"{name}_transposed")
        return emit(op.add(emit(op.matmul(value, weight), f"{name}_product"), named[f"{name}_bias"]), name)

    def dropout(value):
        return emit(relax.TupleGetItem(emit(op.nn.dropout(value, RATE), "pair"), 0), "dropped")

    def heads(value):
        split = emit(op.reshape(value, (*shape(value)[:2], HEADS, HIDDEN // HEADS)), "split")
        return emit(op.permute_dims(split, [0, 2, 1, 3]), "heads")

    def norm(value, index):
        gamma, beta = named[f"gamma_{index}"], named[f"beta_{index}"]
        return emit(op.nn.layer_norm(value, gamma, beta, [-1], EPSILON), f"norm_{index}")

    q, k, v = (heads(linear(x, name)) for name in "qkv")
    scores = emit(op.matmul(q, emit(op.permute_dims(k, [0, 1, 3, 2]), "k_transposed")), "scores")
    scale = relax.const(1 / math.sqrt(HIDDEN // HEADS), x.ty.dtype)
    scores = emit(op.add(emit(op.multiply(scores, scale), "scaled"), named["bias"]), "masked")
    weights = dropout(emit(op.nn.softmax(scores, -1), "weights"))
    context = emit(op.permute_dims(emit(op.matmul(weights, v), "context"), [0, 2, 1, 3]), "merged")
    context = emit(op.reshape(context, shape(x)), "merged")
    x = norm(emit(op.add(dropout(linear(context, "o")), x), "residual"), 1)
    up = emit(op.nn.gelu(linear(x, "up")), "gelu")
    return norm(emit(op.add(dropout(linear(up, "down")), x), "residual"), 2)


def torch_layer(args: list[torch.Tensor], masks: list[torch.Tensor]) -> torch.Tensor:
    """The layer in torch, multiplying by given masks."""
    named = dict(zip(NAMES, args, strict=True))
    drawn = iter(masks)

    def linear(value, name):
        return F.linear(value, named[f"{name}_weight"], named[f"{name}_bias"])

    def dropout(value):
        return value * next(drawn).to(value.dtype).div(1 - RATE)

    def heads(value):
        return value.view(BATCH, LENGTH, HEADS, HIDDEN // HEADS).transpose(1, 2)

    def norm(value, index):
        return F.layer_norm(value, (HIDDEN,), named[f"gamma_{index}"], named[f"beta_{index}"], EPSILON)

    x = named["x"]
    q, k, v = (heads(linear(x, name)) for name in "qkv")
    scores = q @ k.transpose(-1, -2) / math.sqrt(HIDDEN // HEADS) + named["bias"]
    context = (dropout(scores.softmax(-1)) @ v).transpose(1, 2).reshape(BATCH, LENGTH, HIDDEN)
    x = norm(dropout(linear(context, "o")) + x, 1)
    return norm(dropout(linear(F.gelu(linear(x, "up")), "down")) + x, 2)
