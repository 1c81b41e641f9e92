"""Cases → records, in processes of their own: one that dies or does not end is a record of its own."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from tests.corpus.pinned import pin_environment
from tests.corpus.record import failed_record, record_of
from tests.corpus.suites import imports_of
from tests.pool import run_pool

__all__ = ["records"]

Record = dict[str, Any]


def records(
    names: Sequence[str],
    report: Callable[[Record], None],
    *,
    jobs: int = 1,
    seconds: float = 120.0,
    count_forwards: bool = True,
) -> None:
    """Calls ``report`` with each case's record as it ends; ``jobs=0``: in this process, without a limit of time."""
    if jobs == 0:
        for name in names:
            report(record_of(name, count_forwards=count_forwards))
        return
    pin_environment()
    run_pool(
        names,
        partial(_serve, count_forwards),
        report,
        failed=failed_record,
        jobs=jobs,
        seconds=seconds,
        imports=imports_of(names),
    )


def _serve(count_forwards: bool, connection: Connection) -> None:
    gc.collect()
    gc.freeze()  # torch's and TVM's objects stay: collections between cases are quick
    connection.send(None)
    while (name := connection.recv()) is not None:
        connection.send(record_of(name, count_forwards=count_forwards))
