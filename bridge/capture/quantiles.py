"""Quantiles for tracing: ``torch.quantile`` and ``torch.nanquantile`` on the CPU → whole operators, before torch 2.13.

There torch reads whether the levels are between 0 and 1, and neither a fake run nor ``torch.export`` gets past that.
The operator is torch's kernel, which still asks, at each call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from bridge.base.devices import HOST
from bridge.base.torch_internals import aten
from bridge.capture.whole_functions import HANDLERS, WholeFunction, define_whole

__all__: list[str] = []

_READS_LEVELS = torch.__version__ < torch.torch_version.TorchVersion("2.13")


def _defined(name: str) -> Callable[..., torch.Tensor]:
    """Of a tensor of levels. Without numbers it is torch's as well, which asks for those of the CPU alone."""
    operator = getattr(aten, name).default
    schema = f"{name}(Tensor input, Tensor q, int? dim, bool keepdim, str interpolation) -> Tensor"
    computed = WholeFunction(operator, ("interpolation",))
    return define_whole(schema, computed, computed)


def _traced(function, operator, input, q, dim=None, keepdim=False, *, interpolation="linear", **others):
    is_tensor = isinstance(q, torch.Tensor)
    if input.device != HOST or others or not (is_tensor or 0 <= q <= 1):  # of a level that is none, torch's error
        return function(input, q, dim, keepdim, interpolation=interpolation, **others)
    levels = q if is_tensor else input.new_full((), q)
    levels = levels if interpolation == "linear" else levels.detach()  # which of two numbers it is has no derivative
    return operator(input, levels, dim, keepdim, interpolation)


for _name in ("quantile", "nanquantile"):
    _operator = _defined(_name)
    if _READS_LEVELS:
        for _function in (getattr(torch, _name), getattr(torch.Tensor, _name)):
            HANDLERS[_function] = partial(_traced, _function, _operator)
