"""Decompositions: operator → what it calls instead of its own kernel; the operators that are left whole."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.export.decomp_utils import PRESERVED_ATEN_CIA_OPS
from torch.nn.functional import linear

from bridge.base.torch_internals import (
    OpOverload,
    aten,
    core_decompositions,
    decomposition_of,
    is_preservable,
    preserve_composite,
    schema,
)
from bridge.capture.loops.operators import MARKS
from bridge.capture.passes.preserved_ops import PRESERVED

__all__ = ["CELLS", "composite_formulas", "formulas", "instance_norm", "tables", "whole_operators"]

Table = dict[Any, Callable]


_SELECT_SCATTER = aten.select_scatter.default


_INSTANCE_NORM = aten.instance_norm.default


_KINKED = (aten.sgn.default,)
"""Whose decomposition has no derivative of complex numbers at 0, where the operator's is 0."""


def formulas() -> Table:
    """The decompositions of operators that are no composite ones."""
    return tables()[1]


@functools.cache
def composite_formulas() -> Table:
    """What composite operators do instead of their own kernel."""
    return {op: formula for op, formula in tables()[0].items() if formula is not preserve_composite}


@functools.cache
def whole_operators() -> frozenset:
    """Operators that are left whole; those that write are made functional first."""
    whole = {op for op, formula in tables()[0].items() if formula is preserve_composite}
    every = [op for op in (*whole, *PRESERVED, *MARKS) if isinstance(op, OpOverload)]
    return frozenset(op for op in every if op in MARKS or not schema(op).is_mutable)


@functools.cache
def tables() -> tuple[Table, Table]:
    """What composite operators do instead of their own kernel, and the decompositions of all other operators."""
    others = {op: formula for op, formula in core_decompositions().items() if op not in PRESERVED}
    others[_SELECT_SCATTER] = _unless_symbolic(others[_SELECT_SCATTER])
    others.update((op, _unless_complex(others[op])) for op in _KINKED if op in others)
    others[aten.take.default] = _taken
    composite = {op: others.pop(op) for op in list(others) if is_preservable(op)}
    composite.update({op: _plain_cell(op, formula) for op, formula in CELLS.items()})
    composite[aten.fill_diagonal_.default] = _diagonal_filled
    composite[_INSTANCE_NORM] = functools.partial(_instance_norm, decomposition_of(_INSTANCE_NORM))
    whole = {*PRESERVED_ATEN_CIA_OPS, *PRESERVED} - composite.keys()
    composite.update((op, preserve_composite) for op in whole if is_preservable(op))
    return composite, others


def _plain_cell(op: OpOverload, formula: Callable) -> Callable:
    """A recurrent cell as products and pointwise operators; on CUDA torch has a kernel of its own in between."""
    theirs = decomposition_of(op)

    def decomposed(x: torch.Tensor, *args: Any) -> Any:
        return formula(x, *args) if x.is_cuda else theirs(x, *args)

    return decomposed


def _instance_norm(theirs: Callable, x: torch.Tensor, *args: Any) -> torch.Tensor:
    """What torch's formula calls on CUDA writes running statistics without a word in its schema, so that a functional
    graph would lose them."""
    return instance_norm(x, *args) if x.is_cuda else theirs(x, *args)


def instance_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    variance: torch.Tensor | None,
    from_images: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = True,
) -> torch.Tensor:
    """``torch.instance_norm`` by operators that say what they write: batch normalization of each image's channels for
    themselves. The running statistics, if any, become the mean of what each image made of them; where
    they are only read, nothing is written (torch's kernel writes what was there)."""
    batch, channels = x.shape[:2]
    of_each = [None if each is None else each.repeat(batch) for each in (weight, bias, mean, variance)]
    images = x.contiguous().view(1, batch * channels, *x.shape[2:])
    if mean is None:
        y = aten._native_batch_norm_legit.no_stats(images, *of_each[:2], from_images, momentum, eps)[0]
    elif from_images:
        y = aten._native_batch_norm_legit.default(images, *of_each, from_images, momentum, eps)[0]
    else:
        y = aten._native_batch_norm_legit_no_training.default(images, *of_each, momentum, eps)[0]
    for running, moved in ((mean, of_each[2]), (variance, of_each[3])):
        if running is not None and from_images:
            running.copy_(moved.view(batch, channels).mean(0))
    return y.view(x.shape)


def _unless_complex(formula: Callable) -> Callable:
    """A decomposition that leaves an operator of complex numbers whole."""

    def decomposed(x: torch.Tensor, *args: Any) -> Any:
        return NotImplemented if x.is_complex() else formula(x, *args)

    return decomposed


def _unless_symbolic(formula: Callable) -> Callable:
    """A decomposition of ``select_scatter`` that leaves it whole where nothing is known of the position."""

    def decomposed(x: torch.Tensor, source: torch.Tensor, dim: int, index: Any) -> Any:
        return NotImplemented if isinstance(index, torch.SymInt) else formula(x, source, dim, index)

    return decomposed


def _diagonal_filled(x: torch.Tensor, value: Any, wrap: bool = False) -> torch.Tensor:
    """torch's kernel takes the diagonal for a geometry in memory, which wants sizes that do not vary."""
    if wrap and x.dim() == 2:
        return NotImplemented
    diagonal = x
    while diagonal.dim() > 1:
        diagonal = diagonal.diagonal(0, 0, 1) if diagonal is x else diagonal.diagonal(0, 0, diagonal.dim() - 1)
    diagonal.fill_(value)
    return x


def _taken(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """torch's formula would read an index of one number."""
    return aten.index.Tensor(x.reshape(-1), [index])


# Recurrent cells: ``aten.lstm_cell``, ``aten.gru_cell`` → products and pointwise operators, as torch computes them.
#
# Eager's CUDA kernels fuse what comes after the products, and compute it in float32 for half types. So do these
# formulas, rounding where the fused kernels store.


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
