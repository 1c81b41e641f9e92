"""torch's OpInfo samples: every differentiable float64 operator as a module of its tensor arguments.

torch's lists are imported at first use: that takes seconds, which collecting tests does not need.
"""

from __future__ import annotations

import functools
import time
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.bridge.compare import Call
from tests.sweep.check import Outcome, check, combine

RTOL = 1e-9


class OperatorModule(nn.Module):
    """Calls an OpInfo's function on the tensors in a sample's ``(args, kwargs)``; other arguments stay fixed."""

    def __init__(self, operator: Any, arguments: tuple[tuple, dict[str, Any]]):
        super().__init__()
        self.operator = operator
        leaves, spec = pytree.tree_flatten(arguments)
        self.unflatten = lambda filled: pytree.tree_unflatten(filled, spec)
        self.slots = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.constants = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def forward(self, *tensors: Tensor) -> Any:
        leaves = list(self.constants)
        for slot, tensor in zip(self.slots, tensors, strict=True):
            leaves[slot] = tensor
        args, kwargs = self.unflatten(leaves)
        return self.operator(*args, **kwargs)


def _opinfos() -> ModuleType:
    from torch.testing._internal import common_methods_invocations

    return common_methods_invocations


@functools.cache
def _operators(dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """The OpInfos differentiable in a dtype on the CPU, by ``name`` or ``name:variant``."""
    table = {}
    for op in _opinfos().op_db:
        if op.supports_autograd and dtype in op.supported_dtypes("cpu"):
            table[f"{op.name}:{op.variant_test_name}" if op.variant_test_name else op.name] = op
    return table


def names(dtype: torch.dtype = torch.float64) -> list[str]:
    """The cases of this suite."""
    return list(_operators(dtype))


def samples(name: str, limit: int, dtype: torch.dtype = torch.float64) -> list[Any]:
    """At most ``limit`` of an operator's samples, evenly spread, the first and the last among them."""
    from torch.testing._internal.common_utils import set_rng_seed

    set_rng_seed(0)
    everything = list(_operators(dtype)[name].sample_inputs("cpu", dtype, requires_grad=True))
    if len(everything) <= limit:
        return everything
    chosen = sorted({round(i * (len(everything) - 1) / max(1, limit - 1)) for i in range(limit)})
    return [everything[i] for i in chosen]


def _without_seed(operator: Any, *args: Any, **kwargs: Any) -> Any:
    return operator(*args, **kwargs)


def run_case(
    name: str,
    *,
    limit: int = 4,
    seed: int = 0,
    dynamic: int | None = None,
    recorded: bool = False,
    dtype: torch.dtype = torch.float64,
    kind: type[OperatorModule] = OperatorModule,
) -> Outcome:
    """Forward and VJP of an operator's samples against autograd; ``dynamic``, ``recorded``: see :func:`check`."""
    start, options = time.perf_counter(), {"dynamic": dynamic, "recorded": recorded}
    verdicts = []
    # OpInfo seeds the generator inside every call of a random operator. The comparison seeds it outside, to see the
    # operator's effect on it.
    with mock.patch.object(_opinfos(), "wrapper_set_seed", _without_seed):
        for sample in samples(name, limit, dtype):
            arguments = ((sample.input, *sample.args), sample.kwargs)
            module = kind(_operators(dtype)[name].op, arguments)
            tensors = tuple(leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor))
            # The sample selects the well-defined part of the result (not the sign of a singular vector, for example).
            process = sample.output_process_fn_grad
            verdicts.append(check(module, Call(tensors), rtol=RTOL, seed=seed, process=process, **options))
    return combine(name, verdicts, time.perf_counter() - start)
