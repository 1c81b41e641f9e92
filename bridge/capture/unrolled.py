"""Unrolled loops: a record → whether the steps of a loop stand in it one after the other, by the thousand.

Each operator of such a step is captured, lowered and planned by itself, which takes some hundredths of a second. A loop
is told from a deep network by its weights: every step reads the same ones.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bridge.base.errors import Unsupported
from bridge.base.log import channel
from bridge.capture.rows import Record, values_in

__all__ = ["MOST_OPERATORS", "loops_found", "loops_tell", "unrolled_rows"]

log = channel("dispatch")

#: Operators of a graph with unrolled steps that are compiled: of about five minutes.
MOST_OPERATORS = 1 << 13
#: Operators from which on it is told that it takes long: about a minute.
_MANY = MOST_OPERATORS >> 2
_STEPS = 32
"""Readers of one parameter from which on they are steps."""
_HINT = "dispatch the cell that a step calls, or write the step so that it is found to repeat (docs/loops.md)"


def unrolled_rows(record: Record, parameters: int, forward: str) -> list[Unsupported]:
    """A refusal where unrolled steps are more than :data:`MOST_OPERATORS`; where they are many, it is logged.

    Args:
        parameters: so many of the record's first inputs are parameters.
        forward: what is recorded, in words.
    """
    count = len(record.rows)
    if count <= _MANY:
        return []
    readers = Counter(number for row in record.rows for number in set(values_in((row.args, row.kwargs))))
    if all(readers[number] < _STEPS for number in range(parameters)):
        return []
    if count <= MOST_OPERATORS:
        words = "%s: a loop of %d operators is compiled step by step, which takes minutes: %s"
        log.warning(words, forward, count, _HINT)
        return []
    reason = f"{count} operators of steps that are not proven to be equal, at most {MOST_OPERATORS} are compiled"
    return [Unsupported("a long loop", forward, reason, _HINT)]


# Listener for loops: who compiles a call is told as soon as it is seen to have loops, long before it is traced.


_thread = threading.local()


@contextmanager
def loops_tell(do: Callable[[], object]) -> Iterator[None]:
    """While active, ``do`` is called in this thread when loops have been found in a recorded call."""
    before = getattr(_thread, "do", None)
    _thread.do = do
    try:
        yield
    finally:
        _thread.do = before


def loops_found() -> None:
    """Calls the innermost listener."""
    do = getattr(_thread, "do", None)
    if do is not None:
        do()
