"""Symbolic formulas: how operators run on symbolic sizes while a module is traced, so that they fix none.

Some kernels of torch's in C++ read sizes as numbers (``constant_pad_nd``, ``upsample_nearest2d.vec``, ``lstm_cell``),
which fixes them to the sample's. For most torch has a kernel in Python, which torch.export takes and a fake run does
not: here it does, below autograd for all operators, and above it for those that are named. There, others would be taken
apart that eager draws for as a whole. Where torch has none, the formula is here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from bridge.base.torch_internals import FakeTensorMode, TorchDispatchMode, python_kernels

__all__ = ["SymbolicFormulas", "running"]

_PYTHON_KERNELS = frozenset(
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d "
    "_upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d "
    "_upsample_bilinear2d_aa _upsample_bicubic2d_aa interpolate lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell".split()
    + (["matmul", "__matmul__", "__rmatmul__"] if torch.__version__ < "2.13" else [])  # its C++ reads sizes there
)
"""Composite operators that torch's Python kernels compute as eager does (no draw, the same views and writes), and the
function around some of them: inside it, no mode sees what is called."""


class SymbolicFormulas(TorchFunctionMode):
    """While active, composite operators on symbolic sizes fix none."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        formula = _FORMULAS.get(func)
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
        with _BelowAutograd(), SymbolicFormulas():
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


def _number(value: Any) -> Any:
    """Of a number, or a list of one or none."""
    return next(iter(value), None) if isinstance(value, list | tuple) else value


_FORMULAS: dict[Callable[..., Any], Callable[..., Any]] = dict.fromkeys((F.max_pool1d, torch.max_pool1d), _max_pool1d)
