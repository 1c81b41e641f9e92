"""Agreement: a call of a module with collectives → whether all processes of the group run the same entry.

A compiled call needs fewer collectives than eager: a process that ran eager beside it would exchange the wrong tensors.
So the processes compare their choices first, by one exchange of two numbers; where they differ, each runs eager.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bridge.base.errors import RUN, GuardFailure
from bridge.base.torch_distributed import greatest
from bridge.dispatch.entries import Entries
from bridge.state import SampleCall

__all__ = ["match_together", "no_eager_run"]


def match_together(entries: Entries, call: SampleCall, match: Callable[[SampleCall], Any]) -> tuple[Any, bool]:
    """The matching entry and its inputs, or a guard failure; and whether all processes chose alike.

    ``match``: the closer look at a call that fails the fast check of every entry.
    """
    checks = ((entry, entry.guard.check(call.module, call.args, call.kwargs)) for entry in entries.all)
    found = next((each for each in checks if each[1] is not None), None) or match(call)
    misses = isinstance(found, GuardFailure)
    choice = 0 if misses else 1 + entries.all.index(found[0])
    high, low = greatest([choice, -choice], entries.group)
    if high == -low:
        return found, True
    if not misses:
        found = GuardFailure(RUN, "another process of the group runs another entry, or none", "all of them run eager")
    return found, False


@contextmanager
def no_eager_run() -> Iterator[None]:
    """While active, a failure of compiled code is an error: the other processes have gone on, and eager must not."""
    try:
        yield
    except GuardFailure as failure:
        raise RuntimeError(failure.reason) from failure.__cause__
