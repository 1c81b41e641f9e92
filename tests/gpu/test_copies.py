"""Copies between graphs, in one launch: any number of bytes, places where no vector begins, numbers of the host."""

from __future__ import annotations

import threading

import pytest
import torch

from bridge.compile.cuda.copies import bring, copy
from tests.device import DEVICE
from tests.gpu.marks import ON_A_GPU

pytestmark = ON_A_GPU


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.bool], ids=str)
@pytest.mark.parametrize("count", [1, 2, 11])
def test_copies(dtype, count):
    sizes = [(), (3,), (5, 7), (1, 14, 768), (8, 128, 768), (0, 4), (33, 1025), (2**23 + 3,)]
    sources = [(torch.randn(sizes[k % len(sizes)], device=DEVICE) * 3).to(dtype) for k in range(count)]
    targets = list(map(torch.zeros_like, sources))
    copy(list(zip(targets, sources, strict=True)))
    assert all(map(torch.equal, targets, sources))


def test_copies_of_what_lies_anywhere():
    x = torch.randn(9, 64, device=DEVICE)
    sources = [x[1:].view(-1)[1:-1], x.t(), x, x[:, ::2], x.double(), x]
    targets = [torch.zeros(shape, device=DEVICE) for shape in ((510,), (64, 9), (64, 9), (9, 32), (9, 64), (577,))]
    targets[2], targets[5] = targets[2].t(), targets[5][1:].view(9, 64)
    copy(list(zip(targets, sources, strict=True)))
    assert all(torch.equal(target, source.float()) for target, source in zip(targets, sources, strict=True))


def test_behind_the_end_nothing_is_written():
    target = torch.zeros(64, device=DEVICE, dtype=torch.uint8)
    copy([(target[:37], torch.ones(37, device=DEVICE, dtype=torch.uint8))])
    assert target.tolist() == [1] * 37 + [0] * 27


@pytest.mark.parametrize("count", [1, 3, 128, 300])
def test_numbers_of_the_host_are_those_of_the_call(count):
    """They may be others as soon as it returns, while the device is still busy."""
    sources = [torch.tensor([k, 2**63 + k], dtype=torch.uint64) for k in range(count)]
    targets = [torch.zeros(2, dtype=torch.uint64, device=DEVICE) for _ in sources]
    wanted = [source.tolist() for source in sources]
    torch.cuda._sleep(20_000_000)
    bring(list(zip(targets, sources, strict=True)))
    for source in sources:
        source.fill_(5)
    assert [target.tolist() for target in targets] == wanted


def test_in_a_thread_that_has_done_nothing_yet():
    source, target = torch.randn(100, device=DEVICE), torch.zeros(100, device=DEVICE)
    thread = threading.Thread(target=lambda: copy([(target, source)]))
    thread.start()
    thread.join()
    assert torch.equal(target, source)


def test_of_a_stream():
    stream, source, target = torch.cuda.Stream(), torch.zeros(2**20, device=DEVICE), torch.zeros(2**20, device=DEVICE)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        source.add_(1)
        copy([(target, source)])
    stream.synchronize()
    assert torch.equal(target, source) and bool(target[0])
