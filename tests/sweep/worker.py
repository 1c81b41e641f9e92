"""Cases run in processes of their own, so that a crash or an endless compilation costs one row, not the sweep."""

from __future__ import annotations

import importlib
import multiprocessing
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from tests.sweep.check import Outcome, Verdict, combine

__all__ = ["SUITES", "Settings", "run_cases"]

SUITES = {name: f"tests.sweep.{name}" for name in ("opinfo", "moduleinfo", "zoo", "special")}
"""The modules that offer ``names()`` and ``run_case(name, limit=, seed=)``."""

START_SECONDS = 300.0
"""How long a worker may take to import its suite on a busy machine."""


@dataclass(frozen=True)
class Settings:
    """What a worker is told once."""

    suite: str
    samples: int = 4
    seed: int = 0
    seconds_per_case: float = 120.0
    threads: int = 1
    varying: int | None = None


def _serve(connection: Connection, settings: Settings) -> None:
    """The worker's loop: a name comes in, an outcome goes out; ``None`` ends it."""
    import torch

    torch.set_num_threads(settings.threads)
    suite = importlib.import_module(SUITES[settings.suite])
    options = {} if settings.varying is None else {"varying": settings.varying}
    connection.send(None)
    while (name := connection.recv()) is not None:
        connection.send(suite.run_case(name, limit=settings.samples, seed=settings.seed, **options))


class _Worker:
    """A process that serves cases; it is replaced after a crash or a case that took too long."""

    def __init__(self, settings: Settings, serve: Callable[[Connection, Settings], None]):
        self.settings = settings
        self.serve = serve
        self.process = None

    def run(self, name: str) -> Outcome:
        """The outcome of one case; ``error`` if the process died or did not answer in time."""
        start = time.perf_counter()
        try:
            if self.process is None:
                self._start()
                start = time.perf_counter()
            self.connection.send(name)
            if self.connection.poll(self.settings.seconds_per_case):
                return self.connection.recv()
            reason = f"no result after {self.settings.seconds_per_case:g} s"
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self.process.join(10)
            reason = f"the process died with exit code {self.process.exitcode}"
        self.stop()
        return combine(name, [Verdict("error", reason)], time.perf_counter() - start)

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, remote = context.Pipe()
        self.process = context.Process(target=self.serve, args=(remote, self.settings), daemon=True)
        self.process.start()
        remote.close()
        if not self.connection.poll(START_SECONDS):
            raise TimeoutError(f"a worker of suite {self.settings.suite} did not start within {START_SECONDS:g} s")
        self.connection.recv()

    def stop(self) -> None:
        """End the process, whatever it is doing."""
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.connection.close()
            self.process = None


def run_cases(
    names: Sequence[str],
    settings: Settings,
    report: Callable[[Outcome], None],
    *,
    jobs: int = 1,
    serve: Callable[[Connection, Settings], None] = _serve,
) -> None:
    """Run every case in one of ``jobs`` processes; ``report`` is called with each outcome, one at a time.

    Raises:
        TimeoutError: a worker could not be started; the remaining cases are not run.
    """
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in names:
        waiting.put(name)
    lock = threading.Lock()
    failures: list[TimeoutError] = []

    def work() -> None:
        worker = _Worker(settings, serve)
        try:
            while not failures:
                outcome = worker.run(waiting.get_nowait())
                with lock:
                    report(outcome)
        except queue.Empty:
            pass
        except TimeoutError as failure:
            failures.append(failure)
        finally:
            worker.stop()

    threads = [threading.Thread(target=work) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
