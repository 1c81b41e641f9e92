"""Compiled functions that work on a generator in place, and where they find its lock and engine."""

from __future__ import annotations

import functools
import threading

import torch

from bridge.base.locks import free_in_children
from bridge.base.log import channel
from bridge.compile import Built, bernoulli_function, hold_function, host_backend
from bridge.rng.engine import Layout, find_layout, is_the_lock

__all__ = ["LOCK", "functions", "layout_for"]

log = channel("mt19937")

LOCK = free_in_children(threading.RLock())
"""Held around every call of a function that locks a generator, so that none is locked when the process forks."""


@functools.cache
def functions() -> tuple[Built, Built]:
    """``bernoulli_function`` on one thread and ``hold_function``, in one call of the compiler."""
    wanted = [("bridge_bernoulli", bernoulli_function(False)), ("bridge_hold", hold_function())]
    bernoulli, hold = host_backend().build(wanted)
    hold.function.release_gil = True  # whatever the default: the other thread needs it
    return bernoulli, hold


@functools.lru_cache(maxsize=1)
def layout_for(hold: Built) -> Layout | None:
    """The layout of torch's generators, if what is found is their lock; else ``None`` (logged once)."""
    layout = find_layout()
    if layout is not None and is_the_lock(hold.function, layout):
        return layout
    log.info("the lock of PyTorch %s's generators was not found; dropout masks are left to it.", torch.__version__)
    return None
