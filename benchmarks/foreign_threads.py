"""Foreign threads: other Python threads in the process (a logger, a prefetcher), asleep or at work."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_PAUSE = 5e-3
"""Seconds between two pieces of work of a busy thread."""
_WORK = 50
"""Lines formatted in each piece of work."""


@contextmanager
def foreign_threads(count: int) -> Iterator[None]:
    """While active, there are ``count`` more threads: every other one sleeps, the rest work 200 times a second."""
    over = threading.Event()

    def work() -> None:
        lines: list[str] = []
        while not over.wait(_PAUSE):
            lines = [f"{place}: {len(lines)}" for place in range(_WORK)]

    threads = [threading.Thread(target=work if place % 2 else over.wait, daemon=True) for place in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()
