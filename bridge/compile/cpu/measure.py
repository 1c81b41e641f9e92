"""Measuring: functions that do the same → seconds of each, by turns, in a thread without the caller's modes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from bridge.base.log import channel
from bridge.base.threads import serves
from bridge.compile.cpu.threads import end_team

__all__ = ["in_a_plain_thread", "seconds_of"]

_LOG = channel("compile")

_BUDGET = 4e-3
"""Seconds after which no further round begins, once there were enough."""

_FEWEST_ROUNDS, _MOST_ROUNDS = 3, 20

_AT_A_TIME = 30e-6

_HOPELESS = 2.0
"""Times the fastest one's seconds, after two rounds, from which on a function is measured no further."""

Result = TypeVar("Result")


def seconds_of(
    functions: Mapping[str, Callable[[], object]],
    clock: Callable[[], float] = time.perf_counter,
    at_a_time: float = _AT_A_TIME,
) -> dict[str, float]:
    """The shortest time of each function; others on the machine make it longer, never shorter.

    They take turns, so that a slow moment meets all of them. One that raises is left out.

    Args:
        at_a_time: seconds that are measured at a time: shorter functions run several times in a row.
    """
    started = clock()
    repeats: dict[str, int] = {}
    for name, function in functions.items():
        try:
            begun = clock()
            function()
        except (RuntimeError, ValueError, NotImplementedError) as error:  # what torch has no kernel for
            _LOG.debug("%s cannot be measured: %s", name, error)
            continue
        repeats[name] = max(1, math.ceil(at_a_time / max(clock() - begun, 1e-7)))
    best = dict.fromkeys(repeats, math.inf)
    for turn in range(_MOST_ROUNDS):
        if turn >= _FEWEST_ROUNDS and clock() - started > _BUDGET:
            break
        for name in best:
            if turn > 1 and best[name] > _HOPELESS * min(best.values()):
                continue
            function, count = functions[name], repeats[name]
            begun = clock()
            for _ in range(count):
                function()
            best[name] = min(best[name], (clock() - begun) / count)
    return best


def in_a_plain_thread(function: Callable[[], Result]) -> Result:
    """The function's result, from a thread of its own.

    Grad mode, autocast, inference mode, fake tensors' and other dispatch modes, ``torch.func`` transforms and the
    default device belong to a thread: none of the caller's is active there, and nothing done there changes them.
    The caller's OpenMP threads end first: beside them the others would sleep between two parallel regions.
    """

    def run() -> Result:
        torch.get_num_threads()  # a new thread's OpenMP setting becomes torch's when torch is first asked in it
        with torch.no_grad():
            return function()

    end_team()
    with ThreadPoolExecutor(1, "bridge-measure", serves) as pool:
        return pool.submit(run).result()
