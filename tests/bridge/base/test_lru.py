"""A mapping that keeps the values used last, bounded in number and cost, for threads and forked children."""

import os
import threading
from functools import partial

import pytest

from bridge.base.lru import LeastRecentlyUsed
from tests.threads import together


def test_what_was_not_asked_for_the_longest_leaves_first():
    held = LeastRecentlyUsed[int, str](3)
    for key in (1, 2, 3):
        held.put(key, str(key))
    assert held.get(1) == "1"
    held.put(4, "4")
    assert held.items() == [(3, "3"), (1, "1"), (4, "4")] and held.get(2) is None and len(held) == 3
    held.clear()
    assert not held.items() and held.get(4) is None


def test_costs_are_bounded_together():
    held = LeastRecentlyUsed[int, str](100, budget=10)
    for key in (1, 2, 3):
        held.put(key, str(key), cost=4)
    assert [key for key, _ in held.items()] == [2, 3] and held.cost == 8
    held.put(4, "4", cost=50)
    assert held.items() == [(4, "4")] and held.cost == 50
    held.put(5, "5", cost=1)
    assert held.items() == [(5, "5")] and held.cost == 1


def test_the_first_of_two_stays():
    held = LeastRecentlyUsed[int, list](2)
    first = held.put(1, [])
    assert held.put(1, [], cost=3) is first and held.get(1) is first and held.cost == 0


def test_a_thousand_keys_of_four_threads():
    held, wrong = LeastRecentlyUsed[int, int](16, budget=64), []

    def work(seed: int) -> None:
        for step in range(2000):
            key = (step * 7 + seed) % 1000
            found = held.get(key)
            if found not in (None, -key) or held.put(key, -key, cost=4) != -key:
                wrong.append(key)

    together(*(partial(work, seed) for seed in range(4)))
    assert not wrong and len(held) == 16 and held.cost == 64


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_child_of_a_busy_process_can_use_it():
    held, stop = LeastRecentlyUsed[int, int](4), threading.Event()

    def busy() -> None:
        step = 0
        while not stop.is_set():
            step += 1
            held.put(step, step)

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        for _ in range(5):
            child = os.fork()
            if child == 0:
                held.put(-1, -1)
                os._exit(0 if held.get(-1) == -1 else 1)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        stop.set()
        thread.join()
