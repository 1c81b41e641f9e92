"""Eager on a GPU with the host's kernels: the reference where a GPU's kernel computes float64 with float32 numbers.

torch's CUDA kernels of ``hardswish`` and ``weight_norm`` use constants of float32 even in float64: they are off by
5e-8. Draws, views and results of other types stay the GPU's, so that the same module, arguments and generator can be
run again and only the numbers change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tests.operator_mode import OperatorMode

Kernel = Callable[[torch._ops.OpOverload, tuple, dict[str, Any]], Any]

ROUNDING = 1e-12
"""Share of a result's largest element that kernels of float64 differ by: other orders of sums, not other numbers."""


def on_host(func: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
    """An operator of tensors that are moved to the host."""
    return func(*pytree.tree_map_only(Tensor, Tensor.cpu, args), **pytree.tree_map_only(Tensor, Tensor.cpu, kwargs))


class HostKernels(OperatorMode):
    """Overwrites operators' float64 results by another kernel's results for the same operands.

    Args:
        kernel: the other one; on the host, unless told otherwise.

    Attributes:
        differing: names of the operators whose results were other numbers, by more than the order of a sum.
    """

    def __init__(self, kernel: Kernel = on_host):
        super().__init__()
        self._kernel = kernel
        self.differing: set[str] = set()

    def operator(self, func, args, kwargs):
        kwargs = dict(kwargs)
        if not self._concerns(func, args, kwargs):
            return func(*args, **kwargs)
        copies = pytree.tree_map_only(Tensor, torch.clone, (args, kwargs))
        made = func(*args, **kwargs)
        try:
            other = self._kernel(func, *copies)
        except (NotImplementedError, RuntimeError):  # an operator of the GPU alone
            return made
        for own, exact in zip(pytree.tree_leaves(made), pytree.tree_leaves(other), strict=True):
            # a result for the kernel's own backward may have another shape there
            if isinstance(own, Tensor) and own.dtype == torch.float64 and own.shape == exact.shape:
                exact = exact.to(own.device)
                if _differ(own, exact):
                    self.differing.add(func.overloadpacket.__name__)
                own.copy_(exact)
        return made

    @staticmethod
    def _concerns(func: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any]) -> bool:
        if torch.Tag.nondeterministic_seeded in func.tags or "device" in kwargs or "empty" in func.name():
            return False
        if any(result.alias_info and not result.alias_info.is_write for result in func._schema.returns):
            return False
        return any(
            isinstance(leaf, Tensor) and leaf.dtype == torch.float64 for leaf in pytree.tree_leaves((args, kwargs))
        )


def _differ(own: Tensor, exact: Tensor) -> bool:
    both = own.isfinite() & exact.isfinite()
    if not both.any():
        return False
    largest = exact[both].abs().max()
    return bool(((own - exact)[both].abs().max() > ROUNDING * largest).item())
