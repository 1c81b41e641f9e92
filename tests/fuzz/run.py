"""Seeds → verdicts, in this process or in several."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from multiprocessing.connection import Connection

import torch

from bridge.base.session import SESSION
from tests.fuzz.generate import generate
from tests.fuzz.program import Program
from tests.fuzz.verdict import Verdict
from tests.pool import run_pool

Judge = Callable[[Program], Verdict]

KEEP = 20
"""Programs between two releases of memory shared by equal graphs, which is of little use here."""


def run_seeds(
    seeds: Iterable[int],
    judge: Judge,
    report: Callable[[int, Verdict], None],
    *,
    make: Callable[[int], Program] = generate,
    jobs: int | None = None,
    seconds: float = 300.0,
) -> None:
    """Calls ``report`` with each seed and its program's verdict.

    Args:
        jobs: processes, each with one thread; a seed whose process dies, or takes more than ``seconds``, is a crash.
            ``None``: this process, which a kernel's assertion on a GPU leaves without its device.
    """
    if jobs is None:
        for seed, verdict in _verdicts(seeds, judge, make):
            report(seed, verdict)
        return
    run_pool(
        seeds,
        partial(_serve, judge, make),
        lambda result: report(*result),
        failed=lambda seed, reason, _: (seed, Verdict("crash", reason)),
        ends=lambda result: result[1].lost,
        jobs=jobs,
        seconds=seconds,
        imports=["tests.fuzz.check"],
    )


def _serve(judge: Judge, make: Callable[[int], Program], connection: Connection) -> None:
    """A process's loop: receives a seed, sends it back with its verdict; ``None`` ends it."""
    connection.send(None)
    for result in _verdicts(iter(connection.recv, None), judge, make):
        connection.send(result)


def _verdicts(seeds: Iterable[int], judge: Judge, make: Callable[[int], Program]) -> Iterator[tuple[int, Verdict]]:
    """Each seed with its verdict, up to the one that loses the device."""
    torch.set_num_threads(1)
    for noisy in ("torch.fx", "torch.export", "torch._export"):  # they print the graph of each refused program
        logging.getLogger(noisy).setLevel(logging.CRITICAL)
    for position, seed in enumerate(seeds):
        if position % KEEP == 0:
            SESSION.reset("programs")
        with contextlib.redirect_stderr(io.StringIO()):  # torch.export prints the graph of a refused program
            verdict = judge(make(seed))
        yield seed, verdict
        if verdict.lost:
            return
