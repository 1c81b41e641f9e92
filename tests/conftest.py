"""What every test runs under."""

from __future__ import annotations

import inspect

import pytest
import torch

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


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("no GPU")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Of a run of the tests that want a GPU: how many ran, and where."""
    if config.option.markexpr != "gpu":
        return
    ran = sum(len(terminalreporter.stats.get(outcome, ())) for outcome in ("passed", "failed"))
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    terminalreporter.write_line(f"{ran} tests ran on {where}, torch {torch.__version__}")
