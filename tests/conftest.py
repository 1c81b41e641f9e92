"""What every test runs under."""

from __future__ import annotations

import inspect

import pytest

from bridge.compile.schedule.products import GENERATED
from tests.frames import quick_getmodule


@pytest.fixture(scope="session", autouse=True)
def _fixed_products():
    """Matrix products are chosen without a clock: generated code where it is a candidate, torch's elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "bridge.compile.cpu.products.measured",
            lambda policy, product, ways: {GENERATED if GENERATED in ways else ways[0]: 1.0},
        )
        yield


def pytest_configure(config: pytest.Config) -> None:
    """From before the collecting on: it imports modules of TVMScript."""
    patch = pytest.MonkeyPatch()
    patch.setattr(inspect, "getmodule", quick_getmodule)
    config.add_cleanup(patch.undo)
