"""Tiles of products on a GPU: their numbers and bits, in any memory, captured; that a choice is measured and stays."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bridge import add_tvm_dispatch, explain, stats
from bridge.compile import clear_choices
from bridge.compile.cuda import measured_products
from bridge.compile.cuda.tile_choices import TileChoices
from bridge.compile.cuda.tile_kernels import TILED, multiply
from bridge.compile.cuda.tile_ways import tile_ways
from bridge.compile.schedule.products import LayoutClass, ProductShape
from tests.gpu.marks import ON_A_GPU

pytestmark = ON_A_GPU

MEASURED = measured_products.measured
"""Not what tests have in its place."""

EXTENTS = [(328, 768, 256), (14, 100, 768), (61, 132, 36)]


def matrix(rows, columns, unit):
    if unit == "column":
        return matrix(columns, rows, "row").t()
    return torch.randn(rows, columns, device="cuda")


def ways(m, n, k, a, b):
    machine = measured_products.machine(torch.cuda.current_device())
    product = ProductShape("float32", 1, m, n, k, LayoutClass(a), LayoutClass(b))
    return tile_ways(product, machine.multiprocessors, machine.most_parts)


@pytest.mark.parametrize("extents", EXTENTS, ids=str)
@pytest.mark.parametrize(("a", "b"), [("row", "column"), ("row", "row"), ("column", "row"), ("column", "column")])
def test_every_candidate_gives_the_numbers_and_the_same_bits_again(extents, a, b):
    torch.manual_seed(0)
    m, n, k = extents
    first, second = matrix(m, k, a), matrix(k, n, b)
    wanted = first.double() @ second.double()
    for way in ways(m, n, k, a, b):
        numbers = list(map(int, way.split()[1:]))
        one, two = (torch.full((m, n), torch.nan, device="cuda") for _ in range(2))
        multiply(first, second, one, numbers)
        multiply(first, second, two, numbers)
        assert torch.equal(one, two)
        assert (one - wanted).abs().max() <= 1e-5 * wanted.abs().max()
        multiply(matrix(m, k + 1, "row")[:, 1:].copy_(first), second, two, numbers)  # rows begin anywhere
        assert torch.equal(one, two)


def test_a_stream_is_captured_around_it():
    a, b, out = matrix(64, 256, "row"), matrix(256, 128, "row"), torch.empty(64, 128, device="cuda")
    numbers = list(map(int, ways(64, 128, 256, "row", "row")[0].split()[1:]))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # the kernel may be loaded here
        multiply(a, b, out, numbers)
    graph.replay()
    torch.testing.assert_close(out, a @ b, rtol=1e-4, atol=1e-4)


def test_a_choice_is_measured_and_draws_nothing(monkeypatch):
    monkeypatch.setattr(measured_products, "measured", MEASURED)
    clear_choices()
    state = torch.cuda.get_rng_state()
    product = ProductShape("float32", 1, 96, 256, 512, LayoutClass("row"), LayoutClass("column"))
    way = TileChoices(torch.cuda.current_device()).tile(product, ["mm"])
    assert way is None or way.startswith(TILED)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    clear_choices()


@pytest.mark.parametrize("recorded", [False, True])
def test_a_network(recorded, monkeypatch):
    monkeypatch.setattr(measured_products, "measured", lambda index, product, ways: {ways[0]: 1.0, ways[-1]: 0.5})
    clear_choices()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512)).cuda()
    x = torch.randn(96, 512, device="cuda", requires_grad=True)
    module(x).square().sum().backward()
    wanted = [x.grad, *(parameter.grad for parameter in module.parameters())]
    x.grad = None
    module.zero_grad()
    add_tvm_dispatch(module, x, cuda_graphs=recorded)
    for _ in range(4):
        x.grad = None
        module.zero_grad()
        module(x).square().sum().backward()
        found = [x.grad, *(parameter.grad for parameter in module.parameters())]
        for one, two in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)
    assert stats(module).hits == 4
    assert "matrix products: tiles of generated code" in str(explain(module))
    clear_choices()
