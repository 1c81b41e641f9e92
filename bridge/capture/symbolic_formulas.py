"""Symbolic formulas: how operators run on symbolic sizes while a module is traced, so that they fix none.

Some kernels of torch's in C++ read sizes as numbers (``constant_pad_nd``, ``upsample_nearest2d.vec``, ``lstm_cell``),
which fixes them to the sample's. For most torch has a kernel in Python, which torch.export takes and a fake run does
not: here it does, below autograd for all operators, and above it for those that are named. There, others would be taken
apart that eager draws for as a whole. Where torch has none, the formula is here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from bridge.base.devices import HOST
from bridge.base.torch_internals import FakeTensorMode, TorchDispatchMode, aten, python_kernels
from bridge.capture.upsample_casts import upsamples_cast

__all__ = ["SymbolicFormulas", "running"]

_READS_SIZES = torch.__version__ < "2.13"
"""Whether the C++ of products reads sizes as numbers, too."""

_PYTHON_KERNELS = frozenset(
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d "
    "_upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d "
    "_upsample_bilinear2d_aa _upsample_bicubic2d_aa interpolate lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell".split()
    + (["matmul", "__matmul__", "__rmatmul__"] if _READS_SIZES else [])
)
"""Composite operators that torch's Python kernels compute as eager does (no draw, the same views and writes), and the
function around some of them: inside it, no mode sees what is called."""


class SymbolicFormulas(TorchFunctionMode):
    """While active, composite operators on symbolic sizes fix none.

    Args:
        formulas: of functions that read sizes; ``None``: those that torch.export can trace.
    """

    def __init__(self, formulas: Mapping[Callable[..., Any], Callable[..., Any]] | None = None):
        super().__init__()
        self._formulas = _FORMULAS if formulas is None else formulas

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        formula = self._formulas.get(func)
        if formula is not None and _has_symbolic_sizes(args):
            return formula(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name.partition(".")[0] in _PYTHON_KERNELS:  # of an overload, that of its packet
            with python_kernels():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


class _BelowAutograd(TorchDispatchMode):
    """Every operator takes torch's Python kernel where there is one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        with python_kernels():
            return func(*args, **(kwargs or {}))


@contextmanager
def running(mode: FakeTensorMode) -> Iterator[None]:
    """While active, operators run in ``mode``, on symbolic sizes as in an export."""
    with mode:
        if mode.shape_env is None:
            yield
            return
        with _BelowAutograd(), SymbolicFormulas(_FAKE_FORMULAS), upsamples_cast():
            yield


def _has_symbolic_sizes(args: tuple) -> bool:
    return isinstance(args[0], torch.Tensor) and any(isinstance(extent, torch.SymInt) for extent in args[0].shape)


def _max_pool1d(
    x: torch.Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> torch.Tensor:
    """As eager's operator where autograd follows it: the pooling of a picture of one row."""
    del return_indices  # with them, it is another function
    kernel, step, pad, dilated = map(_number, (kernel_size, stride, padding, dilation))
    pooled = torch.max_pool2d(
        x.unsqueeze(-2), (1, kernel), (1, kernel if step is None else step), (0, pad), (1, dilated), ceil_mode
    )
    return pooled.squeeze(-2)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Eager's attention; where it drops out on a CPU, the formula that eager takes there, by products in Python."""
    if not dropout_p or query.device != HOST:
        options = {"scale": scale, "enable_gqa": enable_gqa}
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
    if enable_gqa:
        key, value = (each.repeat_interleave(query.shape[-3] // each.shape[-3], -3) for each in (key, value))
    scores = _product(query * (scale or query.shape[-1] ** -0.5), key.mT)
    if is_causal:
        attn_mask = torch.ones_like(scores, dtype=torch.bool).tril()
    if attn_mask is not None:
        is_bool = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, float("-inf")) if is_bool else scores + attn_mask
    return _product(F.dropout(scores.softmax(-1), dropout_p).to(value.dtype), value)


def _product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with python_kernels():
        return torch.matmul(x, y)


def _number(value: Any) -> Any:
    """Of a number, or a list of one or none."""
    return next(iter(value), None) if isinstance(value, list | tuple) else value


_FORMULAS: dict[Callable[..., Any], Callable[..., Any]] = dict.fromkeys((F.max_pool1d, torch.max_pool1d), _max_pool1d)
_ATTENTIONS = (F.scaled_dot_product_attention, aten.scaled_dot_product_attention.default)
_FAKE_FORMULAS = _FORMULAS | (dict.fromkeys(_ATTENTIONS, _attention) if _READS_SIZES else {})
"""For a fake run, of which the draws and shapes count: it has no node that stands for an attention."""
