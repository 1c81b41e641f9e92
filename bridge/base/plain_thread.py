"""A plain thread: a function → its result, without any mode of the caller's."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from bridge.base.threads import serves

__all__ = ["in_a_plain_thread"]

Result = TypeVar("Result")


def in_a_plain_thread(function: Callable[[], Result]) -> Result:
    """The function's result, from a thread of its own.

    Grad mode, autocast, inference mode, fake tensors' and other dispatch modes, ``torch.func`` transforms and the
    default device belong to a thread: none of the caller's is active there, and nothing done there changes them.
    """

    def run() -> Result:
        torch.get_num_threads()  # a new thread's OpenMP setting becomes torch's when torch is first asked in it
        with torch.no_grad():
            return function()

    with ThreadPoolExecutor(1, "bridge-measure", serves) as pool:
        return pool.submit(run).result()
