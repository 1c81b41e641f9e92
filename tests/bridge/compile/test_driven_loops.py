"""Steps of loops on a processor: launched by a driver, with weights packed once, in the bits of one by one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bridge import add_tvm_dispatch, remove_tvm_dispatch
from bridge.compile import clear_cache, clear_choices, host_backend
from bridge.compile.cpu.gemm_buffers import NARROW, WIDE
from bridge.compile.cpu.gemm_packed import strip_rows
from bridge.compile.cpu.product_ways import Trial
from bridge.compile.cpu.products import CpuProducts
from bridge.compile.runtime.loop_frame import LoopFrames
from bridge.compile.schedule.products import GENERATED, IN_PANELS, LayoutClass, ProductShape
from bridge.lowering.reuse import clear_lowered


class Lstm(nn.Module):
    """From the last part to the first, its backward from the first to the last; one of two carries is a result, too."""

    def __init__(self):
        super().__init__()
        self.of_x, self.of_h = nn.Linear(5, 16), nn.Linear(4, 16)

    def forward(self, x):
        h = c = x.new_ones(x.shape[1], 4)
        hs = []
        for part in reversed(x):
            i, f, g, o = (self.of_x(part) + self.of_h(h)).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            hs.append(h)
        return torch.stack(hs), c


@pytest.fixture
def packed(monkeypatch):
    """Products of weights in loops are of packed ones, all others torch's."""

    def clear():
        for each in (clear_cache, clear_choices, clear_lowered):
            each()

    def choose(policy, product):
        return IN_PANELS if product.b.lasting else "mm" if product.batch == 1 else "bmm"

    monkeypatch.setattr(CpuProducts, "choose", choose)
    clear()
    yield clear
    clear()


def test_driven_steps_give_the_bits_of_steps_one_by_one(packed, monkeypatch):
    driven, ran = [], LoopFrames.run

    def run(frames, count, *rest):
        driven.append(count)
        ran(frames, count, *rest)

    monkeypatch.setattr(LoopFrames, "run", run)
    torch.manual_seed(0)
    module, x, found = Lstm().double(), torch.randn(6, 3, 5, dtype=torch.float64), []

    def step(leaf):
        leaf.grad = None
        module.zero_grad()
        results = module(leaf)
        sum((each * (n + 1)).sum() for n, each in enumerate(results)).backward()
        found.append([*results, leaf.grad, *(parameter.grad for parameter in module.parameters())])

    step(x.clone().requires_grad_())
    for is_driven in (True, False):
        if not is_driven:
            monkeypatch.setattr("bridge.compile.cpu.backend.step_driver", lambda: None)
            packed()
        leaf = x.clone().requires_grad_()
        add_tvm_dispatch(module, leaf)
        step(leaf)
        step(leaf)  # the second one finds a frame
        remove_tvm_dispatch(module)
    eager, first, *others = found
    assert driven and len(set(driven)) == 1
    for other in others:
        assert all(map(torch.equal, first, other))
    torch.testing.assert_close(first, eager, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("unit", ["row", "column"])
def test_a_packed_product_has_the_bits_of_the_generated_one(unit):
    policy = host_backend().products(2, deterministic=False)
    if policy.packing(IN_PANELS, ProductShape("float32", 1, 4, 4, 4)) is None:
        pytest.skip("no products are generated for this processor")
    torch.manual_seed(0)
    for m, k, n in [(1, 13, 64), (5, 300, 70), (16, 256, 96), (130, 17, 33), (14, 520, 32), (417, 3, 17)]:
        product = ProductShape("float32", 1, m, n, k, LayoutClass(), LayoutClass(unit, lasting=True))
        trial, found = Trial.of(product), []
        trial.a.copy_(torch.randn_like(trial.a)), trial.b.copy_(torch.randn_like(trial.b))
        for run in policy.runs(product, trial, [GENERATED, IN_PANELS]).values():
            trial.c.fill_(float("nan"))
            run()
            found.append(trial.c.clone())
        assert torch.equal(*found), (m, k, n)


def test_strips_are_of_the_height_that_computes_least_in_vain():
    assert [strip_rows(WIDE, rows) for rows in (14, 16, 32, 64)] == [14, 8, 14, 14]
    assert [strip_rows(NARROW, rows) for rows in (6, 16)] == [6, 6]
