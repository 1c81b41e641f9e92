"""Cases run in processes of their own, so that a crash or an endless compilation costs one case, not all."""

from __future__ import annotations

import multiprocessing
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import Any

from tests.device import DEVICE

START_SECONDS = 300.0
"""How long a process may take to import its suite on a busy machine."""

Serve = Callable[[Connection], None]
"""A process's loop, to be pickled: sends ``None`` when it is ready; a case comes in, a result goes out; ``None`` ends
it."""


class _Worker:
    """A process that serves cases; it is replaced after a crash, a case that took too long, or its last result."""

    def __init__(
        self, context: BaseContext, serve: Serve, failed: Callable, ends: Callable[[Any], bool], seconds: float
    ):
        self.context, self.serve, self.failed, self.ends, self.seconds = context, serve, failed, ends, seconds
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
        self.connection, remote = self.context.Pipe()
        self.process = self.context.Process(target=self.serve, args=(remote,), daemon=True)
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
    imports: Sequence[str] = (),
) -> None:
    """Runs every case in one of ``jobs`` processes; ``report`` is called with each result, one at a time.

    Args:
        failed: a case, why it has no result, seconds that it took → the result of one whose process died.
        ends: whether the process that made this result can make no other.
        seconds: for each case.
        imports: modules that one process imports, of which all others are forks: seconds for each on a busy machine.
            Without them, and on a GPU, which a fork cannot use, each starts by itself.

    Raises:
        TimeoutError: a process could not be started; the remaining cases are not run.
    """
    waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for case in cases:
        waiting.put(case)
    context = multiprocessing.get_context("forkserver" if imports and DEVICE.type == "cpu" else "spawn")
    if context.get_start_method() == "forkserver":
        context.set_forkserver_preload([*imports])
    lock = threading.Lock()
    failures: list[TimeoutError] = []

    def work() -> None:
        worker = _Worker(context, serve, failed, ends, seconds)
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
