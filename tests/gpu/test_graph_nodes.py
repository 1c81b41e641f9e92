"""Nodes of captured graphs: fills by a kernel instead of the copy engine, in their places; arguments that change."""

from __future__ import annotations

import ctypes

import pytest
import torch

from bridge.compile.cuda import driver_graphs
from bridge.compile.cuda.copies import bring, bring_anew
from bridge.compile.cuda.driver_graphs import call, captured, new_stream
from tests.device import DEVICE
from tests.gpu.marks import ON_A_GPU

pytestmark = ON_A_GPU


@pytest.fixture(scope="module")
def side():
    return torch.cuda.ExternalStream(new_stream(), DEVICE)


@pytest.fixture
def replaced(monkeypatch):
    """How many fills were replaced in each graph."""
    counts, function = [], driver_graphs.fills_by_kernel
    monkeypatch.setattr(driver_graphs, "fills_by_kernel", lambda *given: counts.append(function(*given)))
    return counts


def fill(tensor, value, size, count):
    name = {1: "cuMemsetD8Async", 2: "cuMemsetD16Async", 4: "cuMemsetD32Async"}[size]
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    call(name, ctypes.c_void_p(tensor.data_ptr()), value, ctypes.c_size_t(count), stream)


@pytest.mark.parametrize("size, value", [(1, 0), (1, 0xA7), (2, 0x1234), (4, 0), (4, 0xDEADBEEF)])
@pytest.mark.parametrize("count", [1, 5, 64, 1000, 2**22 + 3])
def test_fills_are_what_they_were(side, replaced, size, value, count):
    """Between a write before and a read after, in each replay."""
    dtype = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[size]
    memory, source = (torch.zeros(count + 9, dtype=dtype, device=DEVICE) for _ in range(2))
    found = torch.zeros_like(memory)
    source.copy_(torch.full((count + 9,), 77).to(dtype))
    torch.cuda.synchronize()
    with torch.cuda.stream(side), captured(side.cuda_stream) as graphs:
        memory.copy_(source)
        fill(memory, value, size, count)
        found.copy_(memory)
    assert replaced == [1]
    launch = graphs[0].launcher(torch.cuda.current_stream().cuda_stream)
    for _ in range(2):
        found.zero_()
        launch()
        assert found.tolist() == [value] * count + [77] * 9


def test_others_stay_as_they_are(side, replaced):
    """Of several rows, and where no vector begins."""
    memory = torch.ones(64, 64, dtype=torch.uint8, device=DEVICE)
    torch.cuda.synchronize()
    with torch.cuda.stream(side), captured(side.cuda_stream) as graphs:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        sizes = map(ctypes.c_size_t, (64, 8, 4))
        pitch, width, height = sizes
        call("cuMemsetD2D8Async", ctypes.c_void_p(memory.data_ptr()), pitch, 5, width, height, stream)
        fill(memory[8][3:], 6, 1, 10)
    assert replaced == [0]
    graphs[0].launcher(torch.cuda.current_stream().cuda_stream)()
    wanted = torch.ones(64, 64, dtype=torch.uint8)
    wanted[:4, :8], wanted[8, 3:13] = 5, 6
    assert torch.equal(memory.cpu(), wanted)


def test_a_launch_that_is_under_way_keeps_its_numbers(side):
    """The host is ahead: three launches, each with numbers of its own."""
    memory, kept = (torch.zeros(2, dtype=torch.uint64, device=DEVICE) for _ in range(2))
    places = [torch.zeros(2, dtype=torch.uint64, device=DEVICE) for _ in range(3)]
    state = torch.tensor([1, 2], dtype=torch.uint64)
    bring([(memory, state)])
    torch.cuda.synchronize()
    with torch.cuda.stream(side), captured(side.cuda_stream) as graphs:
        bring([(memory, state)])
        kept.copy_(memory)
    launch, anew = graphs[0].launcher(torch.cuda.current_stream().cuda_stream), bring_anew(graphs[0], [memory])
    torch.cuda._sleep(20_000_000)
    for number, place in enumerate(places):
        state.copy_(torch.tensor([number, 2**63 + number], dtype=torch.uint64))
        anew([state])
        launch()
        place.copy_(kept)
    assert [place.tolist() for place in places] == [[number, 2**63 + number] for number in range(3)]
    with torch.cuda.stream(side), captured(side.cuda_stream) as graphs:
        kept.copy_(memory)
    assert bring_anew(graphs[0], [memory]) is None
