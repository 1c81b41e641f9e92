"""What makes two runs of one tree equal: nothing is chosen by a clock, and no case sees what an earlier one left."""

from __future__ import annotations

import gc
import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from bridge.base.session import SESSION
from bridge.compile.schedule.chain_plan import GENERATED
from bridge.trials import Pace

__all__ = ["ENVIRONMENT", "fresh", "pinned", "seeded"]

NOISY = ("torch.fx", "torch.export", "torch._export", "bridge")
"""Loggers that print graphs of what is refused, or advice."""


ENVIRONMENT = {"BRIDGE_CACHE": "0", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
"""No disk cache, one thread, one order of sets of strings; the last two are for processes that are started."""


@contextmanager
def pinned() -> Iterator[None]:
    """While active, what is otherwise decided by measuring is decided by rule, as in ``tests/conftest.py``.

    A product is generated code where that is a candidate and torch's elsewhere; a recurrent layer is oneDNN's; a small
    call is timed beside eager three times, which are three runs of ``forward``.
    Loggers, generators and the number of threads are put back.
    """
    loggers = [logging.getLogger(noisy) for noisy in NOISY]
    levels, threads = [logger.level for logger in loggers], torch.get_num_threads()
    generators = random.getstate(), np.random.get_state()
    with pytest.MonkeyPatch.context() as patch, torch.random.fork_rng(devices=[]):
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.setattr(
            "bridge.compile.cpu.products.measured",
            lambda policy, product, ways: {GENERATED if GENERATED in ways else ways[0]: 1.0},
        )
        patch.setattr("bridge.lowering.pipeline._seconds", lambda *args: {})
        patch.setattr("bridge.dispatch.profitability._PACE", Pace(fewest=1, most=1, warm_up=2))
        torch.set_num_threads(1)
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
            torch.set_num_threads(threads)
            random.setstate(generators[0])
            np.random.set_state(generators[1])


def fresh(seed: int = 0) -> None:
    """Forgets what the process has captured, lowered and compiled, and seeds every generator."""
    SESSION.reset("lowerings", "programs", "choices")
    gc.collect()
    seeded(seed)


def seeded(seed: int) -> None:
    """Seeds every generator of this process."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
