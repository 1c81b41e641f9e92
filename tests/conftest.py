"""What every test runs under."""

from __future__ import annotations

import inspect
import logging
from collections import deque
from typing import Any

import pytest
import torch

from bridge.compile import Built
from bridge.compile.schedule.products import GENERATED
from tests.frames import quick_getmodule

KEPT_KERNELS = 600
"""Of the last that were built; three or so are one library, of two megabytes."""

LONG = tuple(f"tests/{name}/" for name in ("notebooks", "zoo", "typing", "bridge/composition"))
"""Folders of tests that take long: they come first, so that in the end no worker is busy while the other is not."""


@pytest.fixture(scope="session", autouse=True)
def _fixed_products():
    """Matrix products are chosen without a clock: generated code where it is a candidate, torch's elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "bridge.compile.cpu.products.measured",
            lambda policy, product, ways: {GENERATED if GENERATED in ways else ways[0]: 1.0},
        )
        yield


@pytest.fixture(scope="session", autouse=True)
def _kept_kernels():
    """Machine code outlives its test for a while: many tests compile the same few layers, half of it LLVM's work.

    What is found again is what equal loops are made into, as among modules that are alive at the same time.
    """
    kept: deque[Built] = deque(maxlen=KEPT_KERNELS)

    def keep(*args: Any) -> Built:
        kept.append(Built(*args))
        return kept[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bridge.compile.runtime.build.Built", keep)
        yield


def pytest_configure(config: pytest.Config) -> None:
    """From before the collecting on, which imports modules of TVMScript.

    pytest gives its handlers to loggers that do not propagate. To torch's log of traces a handler means that somebody
    traces: each capture would be written down with stacks and graphs.
    """
    patch = pytest.MonkeyPatch()
    patch.setattr(inspect, "getmodule", quick_getmodule)
    patch.setattr(logging.getLogger("torch.__trace"), "propagate", True)
    config.add_cleanup(patch.undo)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))


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
