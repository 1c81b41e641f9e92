"""Loops on a processor, launched by a driver, with weights packed once: the bits of single launches."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
from torch import nn

from bridge import add_tvm_dispatch, remove_tvm_dispatch
from bridge.base.session import SESSION
from bridge.compile import host_backend
from bridge.compile.cpu.gemm import strip_rows
from bridge.compile.cpu.gemm_tile import NARROW, WIDE, register_tile
from bridge.compile.cpu.products import CpuProducts, ProductTrial
from bridge.compile.runtime.layout import ARENAS
from bridge.compile.runtime.loop import _LoopAction
from bridge.compile.runtime.loop_frame import LoopFrames
from bridge.compile.schedule.products import BY_ROWS, GENERATED, IN_PANELS, LayoutClass, ProductShape
from tests.sampling import sampled


class Lstm(nn.Module):
    """From the last part to the first, its backward from the first to the last; one of two carries is also a result."""

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
        SESSION.reset("programs", "choices", "lowerings")

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
    assert driven and set(driven) == {len(x)}
    for other in others:
        assert all(map(torch.equal, first, other))
    torch.testing.assert_close(first, eager, rtol=1e-10, atol=1e-12)


def test_tensors_of_a_loops_memory_are_made_once_and_go_with_it(packed, monkeypatch):
    loops, places = [], _LoopAction._places

    def count(loop, memory):
        loops.append(loop)
        return places(loop, memory)

    monkeypatch.setattr(_LoopAction, "_places", count)
    module, x = Lstm().double(), torch.randn(6, 3, 5, dtype=torch.float64, requires_grad=True)
    add_tvm_dispatch(module, x)
    with torch.inference_mode():  # whose tensors no other mode takes
        module(x)
    for _ in range(2):  # the first block of memory may be one for the forward alone
        module(x)[0].sum().backward()
    known = len(loops)
    assert known and all(loop._lying for loop in loops)
    for _ in range(3):
        module(x)[0].sum().backward()
    assert len(loops) == known
    ARENAS.clear()
    gc.collect()
    assert not any(loop._lying for loop in loops)


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("unit", ["row", "column"])
def test_a_packed_product_has_the_bits_of_the_generated_one(unit, threads):
    policy = host_backend().products(threads, deterministic=False)
    if policy.packing(IN_PANELS, ProductShape("float32", 1, 4, 4, 4)) is None:
        pytest.skip("no products are generated for this processor")
    torch.manual_seed(0)
    for m, k, n in [(1, 13, 64), (5, 300, 70), (16, 256, 96), (130, 17, 33), (14, 520, 32), (417, 3, 17)]:
        product = ProductShape("float32", 1, m, n, k, LayoutClass(), LayoutClass(unit, lasting=True))
        trial, found = ProductTrial.of(product), []
        trial.a.copy_(torch.randn_like(trial.a)), trial.b.copy_(torch.randn_like(trial.b))
        for run in policy.runs(product, trial, [GENERATED, IN_PANELS, BY_ROWS]).values():
            trial.c.fill_(float("nan"))
            run()
            found.append(trial.c.clone())
        assert all(torch.equal(found[0], each) for each in found), (m, k, n)


@pytest.mark.parametrize("threads", sampled([2, 3, 16], [2, 16]))
def test_each_thread_has_rows_of_its_own_and_memory_for_their_strips(threads):
    policy, tile = host_backend().products(threads, deterministic=False), register_tile(host_backend().target)
    if tile is None:
        pytest.skip("no products are generated for this processor")
    for m in range(tile.heights[0] * threads, 1200):
        product = ProductShape("float32", 1, m, 70, 30, LayoutClass("row"), LayoutClass("row", lasting=True))
        (rows, columns), packing = policy.block(BY_ROWS, product), policy.packing(BY_ROWS, product)
        tasks = -(-m // rows)
        assert columns >= 70 and rows * (tasks - 1) < m
        assert -(-rows // packing.strip_rows) <= tile.strips


def test_rows_are_for_each_thread_where_each_has_some():
    """In a loop alone: around it each thread finds its own writes."""
    if register_tile(host_backend().target) is None:
        pytest.skip("no products are generated for this processor")

    def offered(m: int, threads: int, **constant: bool) -> bool:
        b = LayoutClass("row", **constant)
        product = ProductShape("float32", 1, m, 256, 256, LayoutClass("row"), b)
        return BY_ROWS in host_backend().products(threads, deterministic=False).ways(product)

    assert offered(16, 2, lasting=True) and offered(64, 16, lasting=True)
    assert not offered(16, 16, lasting=True) and not offered(16, 1, lasting=True)
    assert not offered(16, 2) and not offered(16, 2, constant=True)


@pytest.mark.parametrize(("seconds", "wanted"), [(0.9, BY_ROWS), (1.04, BY_ROWS), (1.1, IN_PANELS)])
def test_rows_are_taken_where_they_are_about_as_quick(seconds, wanted):
    if register_tile(host_backend().target) is None:
        pytest.skip("no products are generated for this processor")
    SESSION.reset("choices")
    times = {"mm": 3.0, IN_PANELS: 1.0, BY_ROWS: seconds}
    policy = replace(host_backend().products(2, deterministic=False), measure=lambda *_: times)
    product = ProductShape("float32", 1, 16, 256, 256, LayoutClass("row"), LayoutClass("row", lasting=True))
    assert policy.choose(product) == wanted
    SESSION.reset("choices")


def test_strips_are_of_the_height_that_computes_least_in_vain():
    assert [strip_rows(WIDE, rows) for rows in (14, 16, 32, 64)] == [14, 8, 14, 14]
    assert [strip_rows(NARROW, rows) for rows in (6, 16)] == [6, 6]
