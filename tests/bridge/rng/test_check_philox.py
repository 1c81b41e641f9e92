"""The check of a GPU's masks, on a stand-in for a GPU: it finds the rule that eager follows, and every other one."""

from __future__ import annotations

import logging
import math
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from bridge.compile import Gpu
from bridge.rng import computed
from tests import philox

GPU = Gpu(processors=2, threads=256)
HOST = torch.device("cpu")


class Generator:
    """A CUDA generator, as far as the check needs one."""

    offset = 2**34 - 4

    def get_offset(self):
        return self.offset


@pytest.fixture
def eager(monkeypatch):
    """Eager's fused dropout on a GPU with few threads; ``wrong``: its deviations."""
    generator, wrong = Generator(), {}

    def native_dropout(x, rate, train):
        count, address, size = x.numel(), x.storage_offset() * x.element_size(), x.element_size()
        width = wrong.get("width") or 16 // size
        while width > 1 and (count % width or address % (width * size)):
            width //= 2
        threads = philox.launched(count, wrong.get("threads", GPU.most_threads))
        mask = philox.mask(count, rate, width, threads, computed._SEED, generator.offset)
        generator.offset += wrong.get("advance", philox.advance(count, GPU.most_threads))
        return None, torch.from_numpy(mask)

    @contextmanager
    def aside(*_):
        yield

    def mask_of_attention(shape, rate, device):
        count = math.prod(shape)
        mask = philox.mask_in_a_row(count, rate, computed._SEED, generator.offset + wrong.get("begin", 0))
        generator.offset += wrong.get("beyond", 0) + -(-count // 4) * 4
        return torch.from_numpy(mask).view(shape)

    monkeypatch.setattr(
        computed,
        "VF",
        SimpleNamespace(native_dropout=native_dropout, empty=torch.empty, tensor=torch.tensor, equal=torch.equal),
    )
    monkeypatch.setattr(computed, "mask_of_attention", mask_of_attention)
    monkeypatch.setattr(computed, "default_generator", lambda device: generator)
    monkeypatch.setattr(computed, "on_side_states", aside)
    monkeypatch.setattr(computed, "_side", lambda device: None)
    monkeypatch.setattr(computed, "gpu_of", lambda device: GPU)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "this GPU")
    monkeypatch.setattr(computed, "_BEGUN", {})
    computed.checked_gpu.cache_clear()
    yield wrong
    computed.checked_gpu.cache_clear()


@pytest.mark.parametrize("is_begun", [False, True])
def test_eagers_rule_is_recognized(eager, is_begun, monkeypatch):
    made = []
    monkeypatch.setattr(
        computed, "_compilation", lambda device, make=computed._compilation: made.append(device) or make(device)
    )
    for _ in range(2 * is_begun):
        computed.begin_check(HOST)
    assert computed.checked_gpu(HOST) == GPU and made == [HOST]
    computed.begin_check(HOST)
    assert made == [HOST]


@pytest.mark.parametrize(
    "wrong",
    [{"width": 2}, {"width": 16}, {"threads": 256}, {"advance": 4}, {"begin": 4}, {"beyond": 4}],
    ids=str,
)
def test_another_rule_is_found_and_told_once(eager, wrong, caplog):
    eager.update(wrong)
    with caplog.at_level(logging.WARNING, "bridge.philox"):
        assert computed.checked_gpu(HOST) is None and computed.checked_gpu(HOST) is None
    assert len(caplog.records) == 1 and "left to it" in caplog.text
