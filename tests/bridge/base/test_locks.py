"""Locks at a fork: the forking thread waits for each holder of a lock, in whatever order threads nest them."""

from __future__ import annotations

import os
import threading
import time

import pytest

from bridge.base import threads


@pytest.mark.cpu("CUDA does not outlive a fork")
@pytest.mark.parametrize("turned", [False, True])
def test_threads_may_nest_locks_in_any_order(monkeypatch, turned):
    outer, inner = threading.RLock(), threading.Lock()
    monkeypatch.setattr(threads, "_LOCKS", [inner, outer] if turned else [outer, inner])
    is_held, forks, states = threading.Event(), threading.Event(), []

    def nest() -> None:
        with outer:
            is_held.set()
            forks.wait(20)
            time.sleep(0.1)  # the other thread is inside of fork
            with inner:
                pass

    def fork() -> None:
        forks.set()
        pid = os.fork()
        if pid == 0:
            free = outer.acquire(blocking=False) and inner.acquire(blocking=False)
            os._exit(0 if free else 1)
        states.append(os.waitpid(pid, 0)[1])

    nesting, forking = (threading.Thread(target=each, daemon=True) for each in (nest, fork))
    nesting.start()
    assert is_held.wait(20)
    forking.start()
    forking.join(20)
    assert states == [0], "the fork waits for ever, or its child found a lock that nobody lets go of"
    nesting.join(20)
    assert not inner.locked() and outer.acquire(blocking=False)
    outer.release()
