"""Compiled functions that work on a generator in place, and where they find its lock and engine."""

from __future__ import annotations

import functools
import threading

import torch

from bridge.base.locks import free_in_children
from bridge.base.log import channel
from bridge.compile import Built, bernoulli_function, hold_function, host_backend, swap_function
from bridge.rng.engine import Layout, find_layout, is_the_lock

__all__ = ["LOCK", "Functions", "functions", "layout_for"]

log = channel("mt19937")

LOCK = free_in_children(threading.RLock())
"""Held around every call of a function that locks a generator, so that none is locked when the process forks."""

Functions = tuple[Built, Built, Built]
"""``bernoulli``, ``hold``, ``swap``; see :mod:`bridge.compile`."""


def functions() -> Functions:
    """The functions, in one call of the compiler."""
    wanted = {"bernoulli": bernoulli_function(False), "hold": hold_function(), "swap": swap_function()}
    bernoulli, hold, swap = host_backend().build([(f"bridge_{name}", func) for name, func in wanted.items()])
    return bernoulli, hold, swap


@functools.lru_cache(maxsize=1)
def layout_for(hold: Built) -> Layout | None:
    """The layout of torch's generators, if what is found is their lock; else ``None`` (logged once)."""
    layout = find_layout()
    if layout is not None and is_the_lock(hold.function, layout):
        return layout
    log.info("the lock of PyTorch %s's generators was not found; dropout masks are left to it.", torch.__version__)
    return None
