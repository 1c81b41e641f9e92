"""Reports about a module on a GPU: launches and bytes, sources in every form, names in profilers."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bridge import add_tvm_dispatch, explain, stats
from bridge.compile.cuda import nvrtc
from bridge.lowering import megabytes
from tests.device import DEVICE
from tests.gpu.marks import ON_A_GPU

pytestmark = ON_A_GPU


class Gated(nn.Module):
    def __init__(self, width: int = 64):
        super().__init__()
        self.up, self.norm = nn.Linear(width, 2 * width), nn.LayerNorm(width)

    def forward(self, x):
        first, second = self.up(x).chunk(2, -1)
        return self.norm(x + F.dropout(first * second.sigmoid(), 0.1))


@pytest.fixture
def gated():
    torch.manual_seed(0)
    module, x = Gated().to(DEVICE), torch.randn(48, 64, device=DEVICE, requires_grad=True)
    add_tvm_dispatch(module, x)
    module(x).sum().backward()
    return module, x


def test_explain_names_launches_and_bytes(gated):
    module, _ = gated
    report = explain(module, full=True)
    text = str(report)
    for program in report.entries[0].programs:
        kernels = [step for step in program.steps if step.kind == "kernel"]
        assert kernels
        for step in kernels:
            assert re.search(r"\d+ x \d+ threads", step.what) and step.bytes > 0
            assert step.what.split(" (")[0] in text and megabytes(step.bytes) in text
    assert "threads" in text


FORMS = {"tvmscript": "launch_thread", "cuda": "__global__", "ptx": ".visible"}


@pytest.mark.parametrize("form", FORMS)
def test_a_report_has_the_source_of_each_kernel(gated, form):
    """With the modules and lines that its launches come from."""
    (entry,) = explain(gated[0]).entries
    for program in entry.programs:
        names = [step.name for step in program.steps if step.kind == "kernel"]
        for name in names:
            source = program.source(name, form)
            assert FORMS[form] in source and "step" in source.splitlines()[0] and "threads" in source.splitlines()[0]


def test_machine_code_as_text_says_what_is_missing(gated, monkeypatch):
    (entry,) = stats(gated[0]).entries
    (name, *_) = entry.forward.kernels
    if nvrtc.disassembler():
        assert "EXIT" in entry.forward.source(name, "sass")
    monkeypatch.setattr(nvrtc, "disassembler", list)
    with pytest.raises(RuntimeError, match="nvdisasm and cuobjdump of CUDA's toolkit: none is on the PATH"):
        entry.forward.source(name, "sass")


def ranges(profile) -> set[str]:
    return {event.name for event in profile.events() if event.name.startswith("tvm: Gated")}


def test_a_profiler_names_programs_steps_and_kernels(gated):
    """Ranges on the host; where CUPTI is at hand, the kernels on the device by the names that sources have."""
    module, x = gated
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        for _ in range(3):
            module(x).sum().backward()
        torch.cuda.synchronize()
    (entry,) = stats(module).entries
    found = ranges(profile)
    for program, direction in ((entry.forward, "forward"), (entry.backward, "backward")):
        for kernel in program.kernels:
            assert any(direction in name and kernel.split("_")[0] in name for name in found), (kernel, found)
    on_device = {e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA}
    if not on_device:
        pytest.skip("no events of the GPU: CUPTI is not at hand")
    for program in (entry.forward, entry.backward):
        for kernel in program.kernels:
            assert any(kernel in name for name in on_device), (kernel, sorted(on_device))


def test_calls_under_emit_nvtx(gated):
    module, x = gated
    with torch.autograd.profiler.emit_nvtx():
        module(x).sum().backward()
    torch.cuda.synchronize()
    assert x.grad.isfinite().all() and not stats(module).misses
