"""Split products: sums of products of parts of the inner axis, in a step of a loop and elsewhere; the same numbers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from autodiff.scan import split_carries
from bridge.base.session import SESSION
from bridge.compile.cpu.products import CpuProducts
from bridge.compile.cuda.products import CudaProducts
from bridge.compile.passes import product_variants
from bridge.compile.schedule.products import LayoutClass, ProductShape
from tests.bridge.compare import check_module


class Gru(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(3, 8)

    def forward(self, x):
        h, hs = x.new_zeros(x.shape[1], 8), []
        for part in x:
            h = self.cell(part, h)
            hs.append(h)
        return torch.stack(hs)


class Plain(nn.Module):
    """The gradient that a step of the backward hands on is a product."""

    def __init__(self):
        super().__init__()
        self.of_x, self.of_h = nn.Linear(3, 8), nn.Linear(8, 8)

    def forward(self, x):
        h, hs = x.new_zeros(x.shape[1], 8), []
        for part in x:
            h = torch.tanh(self.of_x(part) + self.of_h(h))
            hs.append(h)
        return torch.stack(hs)


class Chain(nn.Module):
    """Products that are read by a product, by kernels and only outside."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(3, 8), nn.Linear(8, 4, bias=False), nn.Linear(4, 8, bias=False)

    def forward(self, x):
        h = self.third(self.second(torch.tanh(self.first(x))))
        return torch.nn.functional.softmax(h.transpose(0, 1), -1), self.second(h)


@pytest.mark.parametrize(("make", "carried"), [(Gru, 0), (Plain, 1), (Chain, 0)])
def test_parts_add_up(make, carried, monkeypatch):
    made, split = [], product_variants._split
    in_parts, batch = [], split_carries._batch

    def watched(node, count):
        made.append(count)
        return split(node, count)

    def counted(body, product, count):
        in_parts.append(count)
        return batch(body, product, count)

    monkeypatch.setattr(product_variants, "_split", watched)
    monkeypatch.setattr(split_carries, "_batch", counted)
    monkeypatch.setattr(CpuProducts, "parts", lambda policy, product, **given: 1 if product.k % 4 else 4)
    SESSION.reset("programs", "lowerings")
    check_module(make, lambda: torch.randn(7, 2, 3, requires_grad=True), dtype=torch.float64)
    SESSION.reset("programs", "lowerings")
    assert set(made) == {4} and set(in_parts) == ({4} if carried else set())


@pytest.mark.parametrize(
    ("shape", "count"),
    [((64, 2048, 512), 4), ((64, 512, 2048), 16), ((16, 1024, 256), 2), ((64, 64, 64), 1), ((65, 2048, 512), 1)],
)
def test_parts_are_as_many_as_fill_a_gpu(shape, count):
    product = ProductShape("float32", 1, *shape)
    assert CudaProducts().parts(product, is_step=True) == count
    assert CudaProducts().parts(replace(product, element_type="bfloat16"), is_step=True) == 1


@pytest.mark.parametrize(("rows", "unit", "count"), [(14, "row", 4), (14, "column", 8), (64, "row", 8), (65, "row", 1)])
def test_parts_outside_of_loops_follow_rows_and_the_order_of_memory(rows, unit, count):
    assert CudaProducts().parts(ProductShape("float32", 1, rows, 768, 768, b=LayoutClass(unit))) == count


@pytest.mark.parametrize("shape", [(2, 768, 768), (32, 8, 768)])
def test_products_of_very_few_rows_or_columns_are_split_in_steps_of_loops_alone(shape):
    product = ProductShape("float32", 1, *shape)
    assert CudaProducts().parts(product) == 1 < CudaProducts().parts(product, is_step=True)


def test_parts_of_large_products_are_not_carried_on():
    small, large = (ProductShape("float32", 1, 16, width, 4 * width) for width in (256, 512))
    of = partial(CudaProducts().parts, is_step=True)
    assert of(small, is_carried=True) == of(small) > 1
    assert of(large, is_carried=True) == 1 < of(large)


@pytest.mark.parametrize(
    ("shape", "unit", "by_lt"),
    [
        *(((rows, 128, 512), unit, rows in (8, 16)) for rows in (1, 8, 16, 32) for unit in ("row", "column")),
        *(((16, 512, 128), unit, unit == "column") for unit in ("row", "column")),
        *(((16, 768, 768), "column", False), ((16, 64, 64), "column", False)),
    ],
)
def test_small_products_that_cublas_is_slow_at_are_cublas_lts(shape, unit, by_lt):
    product = ProductShape("float32", 1, *shape, b=LayoutClass(unit))
    assert CudaProducts().choose(product) == ("mm_lt" if by_lt else "mm")
    assert CudaProducts().choose(replace(product, element_type="float64")) == "mm"
