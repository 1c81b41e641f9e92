"""Whether another thread could draw: threads of this package's pools do not, whatever package's frames they wait in."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from bridge.base.threads import is_alone, serves


@pytest.mark.parametrize(("initializer", "expected"), [(serves, True), (None, False)], ids=["of the package", "other"])
def test_a_thread_of_a_pool(initializer, expected):
    assert is_alone()
    over = threading.Event()
    with ThreadPoolExecutor(1, "pool", initializer) as pool:
        pool.submit(int).result()
        assert is_alone() is expected  # idle
        pool.submit(over.wait)
        assert is_alone() is expected  # at work
        over.set()
    assert is_alone()
