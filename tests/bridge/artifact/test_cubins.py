"""NVRTC's results are kept by source, architecture and version."""

from __future__ import annotations

import pytest

from bridge.artifact import current_store
from bridge.base.session import SESSION
from bridge.compile.cuda import nvrtc

SOURCE = 'extern "C" __global__ void __launch_bounds__(256) k0_add(float* a) {}\n'


@pytest.fixture
def asked(monkeypatch, used_cache):
    """All requests to NVRTC: source, architecture, form."""
    found = []

    def compile_source(source, arch, form):
        found.append((source, arch, form))
        return f"{form} {len(found)}".encode()

    monkeypatch.setattr(nvrtc, "_compile", compile_source)
    yield found
    SESSION.reset("programs")


def test_another_process_asks_nvrtc_nothing(asked, monkeypatch):
    first = nvrtc.compiled(SOURCE, "sm_90")
    SESSION.reset("programs")  # as in another process
    assert nvrtc.compiled(SOURCE, "sm_90") == first and len(asked) == 1
    others = [
        nvrtc.compiled(SOURCE + " ", "sm_90"),
        nvrtc.compiled(SOURCE, "sm_80"),
        nvrtc.compiled(SOURCE, "sm_90", "ptx"),
    ]
    monkeypatch.setattr(nvrtc, "version", lambda: "99.0")
    others.append(nvrtc.compiled(SOURCE, "sm_90"))
    assert len({first, *others}) == len(asked) == 5
    (path,) = [path for path in current_store().files() if b"cubin for sm_80" in path.read_bytes()]
    assert b"k0_add" in path.read_bytes()


def test_a_damaged_cubin_is_compiled_again(asked):
    nvrtc.compiled(SOURCE, "sm_90")
    (path,) = current_store().files()
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    SESSION.reset("programs")
    assert nvrtc.compiled(SOURCE, "sm_90") == b"cubin 2"
