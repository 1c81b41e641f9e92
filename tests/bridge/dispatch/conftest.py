"""Recorded graphs without a GPU."""

from __future__ import annotations

import pytest

from bridge.compile.cpu.backend import CpuBackend
from tests.bridge.compile.host_recorder import HostRecorder
from tests.bridge.dispatch.recorded_loops import Pair


@pytest.fixture(scope="module")
def recorder_on_the_host():
    """The CPU's programs are recorded and replayed, as a GPU's are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuBackend, "recorder", lambda self, program: HostRecorder(program), raising=False)
        yield


@pytest.fixture(scope="module")
def pair(recorder_on_the_host):
    """A module whose programs are recorded, and eager's."""
    return Pair()
