"""Products are measured once per machine: another process takes the seconds, and makes the same choice."""

from __future__ import annotations

import pytest

from bridge.artifact import current_store
from bridge.base.session import SESSION
from bridge.compile.cpu import build
from bridge.compile.cpu.backend import host_backend
from bridge.compile.schedule.products import ProductShape

SHAPE = ProductShape("float32", 1, 256, 256, 256)


@pytest.fixture
def measured(monkeypatch, used_cache):
    """The classes that were measured; the seconds say that the last way is the best."""
    found = []

    def measure(policy, product, ways):
        found.append(product)
        return {way: 1.0 / (place + 1) for place, way in enumerate(ways)}

    monkeypatch.setattr("bridge.compile.cpu.products.measured", measure)
    yield found
    SESSION.reset("choices")


def chosen(threads=1, shape=SHAPE):
    SESSION.reset("choices")  # as in another process
    return host_backend().products(threads, False).choose(shape)


def test_another_process_measures_nothing(measured, monkeypatch):
    first = chosen()
    assert chosen() == first and len(measured) == 1
    monkeypatch.setattr(build, "model", lambda: "another processor")
    assert chosen() == first and len(measured) == 2
    chosen(threads=3)
    chosen(shape=ProductShape("float32", 1, 256, 256, 512))
    monkeypatch.setenv("MKL_ENABLE_INSTRUCTIONS", "AVX2")
    chosen()
    assert len(measured) == 5


def test_damage_costs_a_measurement(measured):
    first = chosen()
    for path in current_store().files():
        path.write_bytes(path.read_bytes()[:-2])
    assert chosen() == first and len(measured) == 2
    assert chosen() == first and len(measured) == 2
