"""Threads in tests: actions that run side by side, whose errors are raised in the test."""

from __future__ import annotations

import threading
from collections.abc import Callable


def together(*actions: Callable[[], None]) -> None:
    """Runs each action in a thread of its own, started at the same moment; the first error is raised here."""
    errors: list[BaseException] = []
    gate = threading.Barrier(len(actions))

    def guarded(action: Callable[[], None]) -> None:
        try:
            gate.wait()
            action()
        except BaseException as error:  # noqa: BLE001 — whatever it is, the test has to see it
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
