"""Cases of a suite in separate processes: a process that dies or does not end is an ``error``."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from tests.pool import run_pool
from tests.sweep.check import Outcome, Verdict, combine

SUITES = {
    name: f"tests.sweep.{name}"
    for name in ("opinfo", "opinfo_complex", "opinfo_derived", "moduleinfo", "zoo", "special")
}
"""The modules with ``names()`` and ``run_case(name, limit=, seed=)``."""

TORCHS_LISTS = {
    **dict.fromkeys(
        ("opinfo", "opinfo_complex", "opinfo_derived", "special"),
        ("torch.testing._internal.common_methods_invocations",),
    ),
    "moduleinfo": ("torch.testing._internal.common_modules",),
}
"""Their imports at the first use of a case."""


@dataclass(frozen=True)
class Settings:
    """A worker's settings."""

    suite: str
    samples: int = 4
    seed: int = 0
    seconds_per_case: float = 120.0
    threads: int = 1
    dynamic: int | None = None
    recorded: bool = False


def _serve(settings: Settings, connection: Connection) -> None:
    """The worker's loop: receives a name, sends an outcome; ``None`` ends it."""
    import torch

    torch.set_num_threads(settings.threads)
    suite = importlib.import_module(SUITES[settings.suite])
    options: dict[str, Any] = {} if settings.dynamic is None else {"dynamic": settings.dynamic}
    if settings.recorded:
        options["recorded"] = True
    connection.send(None)
    while (name := connection.recv()) is not None:
        connection.send(suite.run_case(name, limit=settings.samples, seed=settings.seed, **options))


def _failed(name: str, reason: str, seconds: float) -> Outcome:
    return combine(name, [Verdict("error", reason)], seconds)


def run_cases(
    names: Sequence[str],
    settings: Settings,
    report: Callable[[Outcome], None],
    *,
    jobs: int = 1,
    serve: Callable[[Settings, Connection], None] = _serve,
) -> None:
    """Runs every case in one of ``jobs`` processes; calls ``report`` with each outcome, one at a time.

    Raises:
        TimeoutError: a worker could not be started; the remaining cases are not run.
    """
    run_pool(
        names,
        partial(serve, settings),
        report,
        failed=_failed,
        jobs=jobs,
        seconds=settings.seconds_per_case,
        imports=[SUITES[settings.suite], *TORCHS_LISTS.get(settings.suite, ())],
    )
