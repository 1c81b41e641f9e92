"""Helpers of the tests of dynamic shapes: modules with their calls, and entries added for given dimensions."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bridge import add_tvm_dispatch
from tests.bridge.compare import Call


def dispatched(make: Callable[[], nn.Module], call: Call, dynamic_shapes: Any) -> tuple[nn.Module, nn.Module]:
    """A module in float64, and a copy that is compiled for a call whose sizes vary as the specification says."""
    eager = _made(make)
    module = copy.deepcopy(eager)
    add_tvm_dispatch(module, call.args, sample_kwargs=call.kwargs or None, dynamic_shapes=dynamic_shapes)
    return eager, module


def automatic(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """A module in float64, and a copy that is compiled when called, the second size of a dimension for all sizes."""
    eager = _made(make)
    return eager, add_tvm_dispatch(copy.deepcopy(eager))


def _made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().double()


def normal(*shape: int, grad: bool = False) -> torch.Tensor:
    """The same numbers for the same shape."""
    made = torch.Generator().manual_seed(sum(size * 31**place for place, size in enumerate(shape)))
    return torch.randn(shape, dtype=torch.float64, generator=made).requires_grad_(grad)
