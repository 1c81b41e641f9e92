"""Cases run in processes of their own, so that a crash or an endless compilation costs one case, not all."""

from __future__ import annotations

import multiprocessing
import queue
import threading
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from typing import Any

__all__ = ["run_pool"]

START_SECONDS = 300.0
"""How long a process may take to import its suite on a busy machine."""

Serve = Callable[[Connection], None]
"""A process's loop, to be pickled: sends ``None`` when it is ready; a case comes in, a result goes out; ``None`` ends
it."""


class _Worker:
    """A process that serves cases; it is replaced after a crash, a case that took too long, or its last result."""

    def __init__(self, serve: Serve, failed: Callable, ends: Callable[[Any], bool], seconds: float):
        self.serve, self.failed, self.ends, self.seconds = serve, failed, ends, seconds
        self.process = None

    def run(self, case: Any) -> Any:
        """The result of one case; of ``failed`` if the process died or did not answer in time."""
        start = time.perf_counter()
        try:
            if self.process is None:
                self._start()
                start = time.perf_counter()
            self.connection.send(case)
            if self.connection.poll(self.seconds):
                result = self.connection.recv()
                if self.ends(result):
                    self.stop()
                return result
            reason = f"no result after {self.seconds:g} s"
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self.process.join(10)
            reason = f"the process died with exit code {self.process.exitcode}"
        self.stop()
        return self.failed(case, reason, time.perf_counter() - start)

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, remote = context.Pipe()
        self.process = context.Process(target=self.serve, args=(remote,), daemon=True)
        self.process.start()
        remote.close()
        if not self.connection.poll(START_SECONDS):
            raise TimeoutError(f"a process did not start within {START_SECONDS:g} s")
        self.connection.recv()

    def stop(self) -> None:
        """End the process, whatever it is doing."""
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.connection.close()
            self.process = None


def run_pool(
    cases: Iterable[Any],
    serve: Serve,
    report: Callable[[Any], None],
    *,
    failed: Callable[[Any, str, float], Any],
    ends: Callable[[Any], bool] = lambda result: False,
    jobs: int = 1,
    seconds: float = 120.0,
) -> None:
    """Runs every case in one of ``jobs`` processes; ``report`` is called with each result, one at a time.

    Args:
        failed: a case, why it has no result, seconds that it took → the result of one whose process died.
        ends: whether the process that made this result can make no other.
        seconds: for each case.

    Raises:
        TimeoutError: a process could not be started; the remaining cases are not run.
    """
    waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for case in cases:
        waiting.put(case)
    lock = threading.Lock()
    failures: list[TimeoutError] = []

    def work() -> None:
        worker = _Worker(serve, failed, ends, seconds)
        try:
            while not failures:
                result = worker.run(waiting.get_nowait())
                with lock:
                    report(result)
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
