"""Cases → records, in separate processes: a process that dies or does not end gives a record as well."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from tests.corpus.pinned import ENVIRONMENT
from tests.corpus.record import failed_record, record_of
from tests.corpus.suites import imports_of
from tests.pool import run_pool

Record = dict[str, Any]

MOST_SERVED = 250
"""The most cases of one process: each leaves a megabyte in torch's and TVM's caches."""


def records(
    names: Sequence[str],
    report: Callable[[Record], None],
    *,
    jobs: int = 1,
    seconds: float = 120.0,
    forwards: str = "some",
) -> None:
    """Calls ``report`` with each case's record as it ends.

    Args:
        jobs: processes; 0: in this one, without a time limit.
        seconds: the limit of a case, after which it is a crash.
        forwards: the cases that count runs of ``forward``: ``"all"``, ``"some"`` or ``"none"``.
    """
    if jobs == 0:
        for name in names:
            report(record_of(name, forwards))
        return
    os.environ.update(ENVIRONMENT)
    run_pool(
        names,
        partial(_serve, forwards),
        report,
        failed=failed_record,
        ends=lambda record: record.get("served", 0) >= MOST_SERVED,
        jobs=jobs,
        seconds=seconds,
        imports=imports_of(names),
    )


def _serve(forwards: str, connection: Connection) -> None:
    gc.collect()
    gc.freeze()  # torch's and TVM's objects stay: collections between cases become fast
    connection.send(None)
    for served, name in enumerate(iter(connection.recv, None), 1):
        connection.send({**record_of(name, forwards), "served": served})
