"""torch's ModuleInfo samples: every ``nn`` module in train mode, float64, parameters and inputs requiring grad.

torch's list is imported at first use: that takes seconds, which collecting tests does not need.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import torch

from tests.bridge.compare import Call
from tests.sweep.check import Outcome, check, combine

RTOL = 1e-9


@functools.cache
def _modules() -> dict[str, Any]:
    """The ModuleInfos of float64 by name (``nn.Linear``)."""
    from torch.testing._internal.common_modules import module_db

    return {info.name: info for info in module_db if torch.float64 in info.dtypes}


def names() -> list[str]:
    """The cases of this suite."""
    return list(_modules())


def run_case(
    name: str, *, limit: int = 4, seed: int = 0, dynamic: int | None = None, recorded: bool = False
) -> Outcome:
    """One step of each of at most ``limit`` evenly spread samples against eager; further options: see :func:`check`."""
    from torch.testing._internal.common_utils import set_rng_seed

    start = time.perf_counter()
    info = _modules()[name]
    set_rng_seed(0)
    everything = info.module_inputs_func(info, device="cpu", dtype=torch.float64, requires_grad=True, training=True)
    everything = [sample for sample in everything if sample.forward_input is not None]
    chosen = sorted({round(i * (len(everything) - 1) / max(1, limit - 1)) for i in range(limit)})
    verdicts = []
    for index in chosen if everything else []:
        sample = everything[index]
        arguments = sample.constructor_input
        module = info.module_cls(*arguments.args, **arguments.kwargs).to(torch.float64).train()
        call = Call(tuple(sample.forward_input.args), dict(sample.forward_input.kwargs))
        verdicts.append(check(module, call, rtol=RTOL, seed=seed, dynamic=dynamic, recorded=recorded))
    return combine(name, verdicts, time.perf_counter() - start)
