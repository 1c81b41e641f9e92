"""Recurrent cells: ``aten.lstm_cell``, ``aten.gru_cell`` → products and pointwise operators, as torch computes them.

Eager's CUDA kernels fuse what comes after the products, and compute it in float32 for half types. So do these formulas,
rounding where the fused kernels store.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from bridge.base.torch_internals import aten

__all__ = ["CELLS"]

_HALF = (torch.float16, torch.bfloat16)


def _wide(*tensors: Tensor | None) -> list[Tensor | None]:
    """Half types as float32."""
    return [tensor.float() if tensor is not None and tensor.dtype in _HALF else tensor for tensor in tensors]


def _plus(product: Tensor, bias: Tensor | None) -> Tensor:
    return product if bias is None else product + bias


def _lstm_cell(
    x: Tensor,
    states: list[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    h, c = states
    dtype = c.dtype
    of_x, of_h, b_ih, b_hh, c = _wide(linear(x, w_ih), linear(h, w_hh), b_ih, b_hh, c)
    gates = _plus(of_x, b_ih) + _plus(of_h, b_hh)
    i, f, g, o = gates.chunk(4, 1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    h = o.sigmoid() * c.tanh()
    return h.to(dtype), c.to(dtype)


def _gru_cell(
    x: Tensor, h: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> Tensor:
    dtype = h.dtype
    of_x, of_h, b_ih, b_hh, h = _wide(linear(x, w_ih), linear(h, w_hh), b_ih, b_hh, h)
    of_x, of_h = _plus(of_x, b_ih), _plus(of_h, b_hh)
    (r_x, z_x, n_x), (r_h, z_h, n_h) = of_x.chunk(3, 1), of_h.chunk(3, 1)
    r, z = (r_x + r_h).sigmoid(), (z_x + z_h).sigmoid()
    n = (n_x + r * n_h).tanh()
    return (n + z * (h - n)).to(dtype)


CELLS: dict[Any, Callable[..., Any]] = {aten.lstm_cell.default: _lstm_cell, aten.gru_cell.default: _gru_cell}
"""By operator, with its arguments."""
