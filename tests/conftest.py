"""Fixtures and hooks of all tests."""

from __future__ import annotations

import gc
import inspect
import linecache
import logging
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from bridge.compile import Built
from bridge.lowering import LoweredCall, reuse
from tests.device import DEVICE, factories_on, moved
from tests.frames import quick_checkcache, quick_getmodule
from tests.unclocked import choose_without_clock

KEPT_KERNELS = 600
"""Of the last that were built; three or so are one library, of two megabytes."""

os.environ["BRIDGE_RAISE"] = "1"  # a bug that a handler would swallow fails a test
os.environ["BRIDGE_CACHE"] = "0"  # also in processes that tests start; tests of the cache have one of their own

LONG = tuple(f"tests/{name}/" for name in ("notebooks", "zoo", "typing", "bridge/composition"))
"""Folders of tests that take long: they come first, so that in the end no worker is busy while the other is not."""

QUICK = 60

ON_ANY_DEVICE = tuple(
    f"tests/bridge/{room}/"
    for room in ("aten", "capture", "dispatch", "library", "lowering", "parity", "show", "state", "verify")
)
"""Rooms whose tests run on the device of :mod:`tests.device`, but for tests marked as being about the CPU."""


@pytest.fixture(scope="session", autouse=True)
def _without_clock():
    with pytest.MonkeyPatch.context() as patch:
        choose_without_clock(patch.setattr)
        yield


@pytest.fixture(scope="session", autouse=True)
def _kept_kernels():
    """Machine code outlives its test for a while: many tests compile the same few layers, half of it LLVM's work.

    Equal loops share their code, as among modules that are alive at the same time.
    """
    kept: deque[Built] = deque(maxlen=KEPT_KERNELS)

    def keep(*args: Any) -> Built:
        kept.append(Built(*args))
        return kept[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bridge.compile.runtime.build.Built", keep)
        yield


@pytest.fixture(scope="session", autouse=True)
def _known_as_frozen():
    """Frozen objects are not counted again for every module that is added: a million objects took 30 ms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bridge.base.collector.has_frozen", lambda: True)
        patch.setattr("bridge.guards.objects.has_frozen", lambda: True)
        yield


@pytest.fixture(scope="module")
def lowered_once():
    """For files whose tests add equal modules: a call is lowered once, and its lowering outlives the test.

    Not for tests of capture and lowering themselves, which would find an earlier test's lowerings.
    """
    kept, remember = [], reuse._remember

    def keep(call_key: tuple, observation_key: tuple, lowered: LoweredCall) -> None:
        kept.append(lowered)
        remember(call_key, observation_key, lowered)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reuse, "_remember", keep)
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="the tests that are marked as sweeps, too")
    parser.addoption(
        "--quick", action="store_true", help=f"one of {QUICK} tests, the same ones each time; no slow ones"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Speeds up ``inspect`` and the collector before tests are collected, which imports modules of TVMScript.

    pytest gives its handlers to loggers that do not propagate. A handler switches torch's log of traces on: each
    capture would be written down with stacks and graphs.
    """
    gc.set_threshold(10_000, 20, 20)  # with all of torch imported, collections were a twentieth of the time
    patch = pytest.MonkeyPatch()
    patch.setattr(inspect, "getmodule", quick_getmodule)
    patch.setattr(linecache, "checkcache", quick_checkcache)
    patch.setattr(logging.getLogger("torch.__trace"), "propagate", True)
    config.add_cleanup(patch.undo)


def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))
    if DEVICE.type == "cpu":
        if not config.getoption("--all"):
            _keep(items, config, lambda item: item.get_closest_marker("sweep") is None)
        if config.getoption("--quick"):
            _keep(items, config, _is_quick)
        return
    _keep(items, config, _is_about)
    for item in items:  # eager warns of every copy of a recurrent module
        item.add_marker(pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Freezes imported and collected objects: no collection of garbage walks through them any more."""
    gc.collect()
    gc.freeze()


def _is_quick(item: pytest.Item) -> bool:
    is_slow = item.get_closest_marker("slow") is not None or item.nodeid.startswith(LONG)
    return not is_slow and zlib.crc32(item.nodeid.encode()) % QUICK == 0


def _keep(items: list[pytest.Item], config: pytest.Config, wanted: Callable[[pytest.Item], bool]) -> None:
    config.hook.pytest_deselected(items=[item for item in items if not wanted(item)])
    items[:] = filter(wanted, items)


def _is_about(item: pytest.Item) -> bool:
    """Whether a test is for another device than the CPU: marked ``gpu``, or in a room of any device and not ``cpu``."""
    if item.get_closest_marker("gpu") is not None:
        return True
    return item.nodeid.startswith(ON_ANY_DEVICE) and item.get_closest_marker("cpu") is None


def _on_any_device(nodeid: str) -> bool:
    return DEVICE.type != "cpu" and nodeid.startswith(ON_ANY_DEVICE)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """Tensors that a test file of any device makes at import, also samples inside of objects, are on the device."""
    if not (isinstance(collector, pytest.Module) and _on_any_device(collector.nodeid)):
        return (yield)
    with factories_on(DEVICE):
        return (yield)


@pytest.fixture(autouse=True, scope="module")
def _made_on_the_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tensors and modules of tests that run on any device, and of their fixtures, are made on the tested device.

    Constants that were imported from a helper, which another file may have imported before, are moved.
    """
    if not _on_any_device(request.node.nodeid):
        yield
        return
    names = vars(request.module)
    constants = {name: value for name, value in names.items() if isinstance(value, (torch.Tensor, tuple, list, dict))}
    names.update({name: moved(value) for name, value in constants.items() if not name.startswith("__")})
    with factories_on(DEVICE):
        yield


@pytest.fixture(autouse=True, scope="module")
def _frozen_anew() -> Iterator[None]:
    """Freezes objects that outlive a file (modules of torch that it imported first, kernels), which are never garbage.

    Each recorded call looks through all other objects.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _the_context_outlives_a_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """An assertion in a kernel ends the process, whose GPU context serves no other test."""
    yield
    if not _on_any_device(request.node.nodeid):
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        if "PYTEST_XDIST_WORKER" in os.environ:
            os._exit(1)  # the run goes on with another worker, and names the test
        pytest.exit(f"{request.node.nodeid} ended the GPU's context: {error}", returncode=1)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("no GPU")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Reports, for a run on a GPU, how many tests ran, and where."""
    if DEVICE.type == "cpu":
        return
    ran = sum(len(terminalreporter.stats.get(outcome, ())) for outcome in ("passed", "failed"))
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    terminalreporter.write_line(f"{ran} tests ran on {where}, torch {torch.__version__}")
