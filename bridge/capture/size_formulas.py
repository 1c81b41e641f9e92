"""Size formulas: operators on symbolic sizes whose kernels fix them, or take long → the same by others, that do not.

Each takes the forms that its results have in the run on real numbers, then the operator's arguments; it gives
``NotImplemented`` where the operator does as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from bridge.base.devices import HOST
from bridge.base.torch_internals import aten, python_kernels
from bridge.capture.passes.preserved_ops import UPSAMPLES
from bridge.capture.passes.recurrent import LAYERED
from bridge.capture.rows import Form

__all__ = ["FORMULAS", "POOLINGS", "has_symbols"]

_READS_SIZES = torch.__version__ < "2.13"
"""Whether the C++ of products reads sizes as numbers."""


def has_symbols(tensor: torch.Tensor) -> bool:
    """Whether a size of a tensor is a symbol."""
    return any(isinstance(size, torch.SymInt) for size in tensor.shape)


def _layers(
    forms: Sequence[Form], x, states, weights, biases, layers, dropout, train, both_ways, batch_first
) -> tuple[torch.Tensor, ...]:
    """Recurrent layers: their results, and the dropout between them; torch's own formula runs each step."""
    if not isinstance(weights, list | tuple):
        return NotImplemented  # a packed sequence
    first, *finals = forms
    shape = x.shape
    if first.dtype.itemsize < 4 and first.device == HOST:
        shape = list(map(int, shape))  # what these do there is written down step by step
    steps, batch = (shape[1], shape[0]) if batch_first else shape[:2]
    width = first.shape[2]
    for _ in range(layers - 1 if train and dropout else 0):
        torch.dropout(torch.empty((steps, batch, width), dtype=first.dtype, device=first.device), dropout, True)
    y = _made(first, (steps, batch, width))
    each = states if isinstance(states, list | tuple) else [states]
    made = [_made(form, state.shape) for form, state in zip(finals, each, strict=True)]
    return (y.transpose(0, 1) if batch_first else y, *made)


def _made(form: Form, shape: Sequence[Any]) -> torch.Tensor:
    made = torch.empty(shape, dtype=form.dtype, device=form.device)
    return made.requires_grad_().clone() if form.requires_grad else made


def _max_pool1d(
    x: torch.Tensor, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, up=False
) -> torch.Tensor:
    """As eager's operator where autograd follows it: the pooling of a picture of one row."""
    if not has_symbols(x):
        return NotImplemented
    kernel, step, pad, dilated = map(_number, (kernel, stride, padding, dilation))
    pooled = aten.max_pool2d_with_indices.default(
        x.unsqueeze(-2), (1, kernel), (1, kernel if step is None else step), (0, pad), (1, dilated), up
    )
    return pooled[0].squeeze(-2)


def _upsampled(func: Any, forms: Sequence[Form], x: torch.Tensor, *args: Any) -> torch.Tensor:
    """An interpolation: torch's formula in Python goes past the operator to whose argument autocast gives float32."""
    return func(x.to(forms[0].dtype), *args) if x.dtype != forms[0].dtype else NotImplemented


def _attention(
    forms: Sequence[Form], query, key, value, mask=None, rate=0.0, is_causal=False, *, scale=None, enable_gqa=False
) -> torch.Tensor:
    """Attention that drops out on a CPU: the formula that eager takes there, by products in Python."""
    rate = float(rate)
    if not rate or query.device != HOST or not any(map(has_symbols, (query, key, value))):
        return NotImplemented
    if enable_gqa:
        key, value = (each.repeat_interleave(query.shape[-3] // each.shape[-3], -3) for each in (key, value))
    scores = _product(query * (query.shape[-1] ** -0.5 if scale is None else scale), key.mT)
    if is_causal:
        mask = torch.ones_like(scores, dtype=torch.bool).tril()
    if mask is not None:
        is_bool = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, float("-inf")) if is_bool else scores + mask
    return _product(torch.dropout(scores.softmax(-1), rate, True).to(value.dtype), value)


def _product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with python_kernels():
        return torch.matmul(x, y)


def _number(value: Any) -> Any:
    """Of a number, or a list of one or none."""
    return next(iter(value), None) if isinstance(value, list | tuple) else value


POOLINGS: dict[Any, Callable[..., Any]] = {aten.max_pool1d.default: _max_pool1d}
"""Those that functionalization takes too, where they depend on no results."""

FORMULAS: dict[Any, Callable[..., Any]] = {
    **{op: partial(lambda pooled, forms, *args: pooled(*args), pooled) for op, pooled in POOLINGS.items()},
    **dict.fromkeys(LAYERED, _layers),
    **({aten.scaled_dot_product_attention.default: _attention} if _READS_SIZES else {}),
    **{packet.vec: partial(_upsampled, packet.vec) for packet in UPSAMPLES},
}
