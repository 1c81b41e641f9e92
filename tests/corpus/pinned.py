"""Reproducible runs of one tree: no choice depends on a clock, and no case on an earlier one."""

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
from bridge.compile.schedule.products import GENERATED
from bridge.trials import Pace

NOISY = ("torch.fx", "torch.export", "torch._export", "bridge")
"""Loggers that print graphs of refused programs, or advice."""


ENVIRONMENT = {"BRIDGE_CACHE": "0", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
"""No disk cache, one thread, one order of sets of strings; the last two are for new processes."""


@contextmanager
def pinned() -> Iterator[None]:
    """While active, rules replace choices by measuring, as in ``tests/conftest.py``.

    A product is generated code where that is a candidate and torch's elsewhere; a small
    call is timed beside eager three times, with three runs of ``forward``.
    Restores loggers, generators and the number of threads.
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
    """Resets the process's captured, lowered and compiled calls, and seeds every generator."""
    SESSION.reset("lowerings", "programs", "choices")
    gc.collect()
    seeded(seed)


def seeded(seed: int) -> None:
    """Seeds every generator of this process."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
