"""Tiles of products on CUDA: their numbers (by OpenCL), which products they are for, who chooses them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tvm.relax import op

from bridge.compile import backend_for, clear_choices
from bridge.compile.cuda import measured_products
from bridge.compile.cuda.measured_products import Machine
from bridge.compile.cuda.products import CudaProducts
from bridge.compile.cuda.tile_choices import TileChoices
from bridge.compile.cuda.tile_kernels import way_of
from bridge.compile.cuda.tile_source import Tile
from bridge.compile.loop_ir.graph import LibraryCall
from bridge.compile.passes.choose_layouts import choose_layouts
from bridge.compile.schedule.products import LayoutClass, ProductShape
from bridge.compile.translate import translate
from bridge.library import OUT_KERNELS
from tests.bridge.compile_helpers import function
from tests.opencl_products import multiplied

CASES = {
    "a transposed weight": (Tile(16, 32, 16, 4, 4, 2, 3, 1), 1, (37, 45, 50)),
    "a weight, in parts": (Tile(24, 32, 32, 8, 8, 4, 3, 1, b_inner=False), 3, (40, 33, 75)),
    "a gradient": (Tile(16, 32, 16, 4, 4, 2, 3, 1, a_inner=False, b_inner=False), 1, (37, 45, 50)),
}


@pytest.mark.parametrize(("tile", "parts", "extents"), CASES.values(), ids=CASES)
def test_numbers_of_odd_sizes(tile, parts, extents):
    m, n, k = extents
    draw = np.random.default_rng(0)
    a, b = (draw.standard_normal(each).astype(np.float32) for each in ((m, k), (k, n)))
    found = multiplied(tile, parts, a, b)
    np.testing.assert_allclose(found, a.astype(np.float64) @ b, rtol=0, atol=1e-5)


PRODUCT = ProductShape("float32", 1, 328, 768, 768, LayoutClass("row"), LayoutClass("column"))
TILE = way_of(Tile(64, 64, 32, 8, 8, 4, 3, 1), 2)


@pytest.fixture
def measured(monkeypatch):
    """The products that were measured; seconds that say which way is the best can be set."""
    found, seconds = [], {}

    def measure(index, product, ways):
        found.append(product)
        return dict.fromkeys(ways, 1.0) | seconds

    monkeypatch.setattr(measured_products, "measured", measure)
    monkeypatch.setattr(measured_products, "machine", lambda index: Machine(132, 8, ("a GPU",)))
    monkeypatch.setattr("bridge.compile.cuda.tile_choices.tile_ways", lambda *product: [TILE])
    clear_choices()
    yield found, seconds
    clear_choices()


def policy():
    return CudaProducts(tiles=TileChoices(0))


@pytest.mark.parametrize(("seconds", "way"), [(0.9, TILE), (0.97, "mm")], ids=["quicker", "as quick"])
def test_a_tile_is_chosen_where_it_is_quicker(measured, seconds, way):
    found, times = measured
    times[TILE] = seconds
    assert policy().choose(PRODUCT) == policy().choose(PRODUCT) == way and len(found) == 1
    assert CudaProducts(tf32=True, tiles=TileChoices(0)).choose(PRODUCT) == "mm"
    assert CudaProducts().choose(PRODUCT) == "mm"


@pytest.mark.parametrize(
    "changes",
    [
        {"element_type": "bfloat16"},
        {"batch": 2},
        {"a": LayoutClass("none"), "k": 767},
        {"k": 766},
        {"n": 1},
        {"m": 4, "n": 8},
    ],
    ids=lambda changes: " ".join(changes),
)
def test_others_are_not_measured(measured, changes):
    assert policy().choose(replace(PRODUCT, **changes)) in ("mm", "bmm") and measured[0] == []


def test_a_tile_takes_the_place_of_parts(measured):
    few = replace(PRODUCT, m=14)
    assert policy().parts(few) > 1
    clear_choices()
    measured[1][TILE] = 0.5
    assert policy().parts(few) == 1 and policy().choose(few) == TILE
    assert policy().parts(few, is_step=True) > 1


def test_choices_go_to_another_process(measured):
    measured[1][TILE] = 0.5
    first = policy()
    assert first.choose(PRODUCT) == TILE
    clear_choices()
    measured[1][TILE] = 2.0
    other = policy()
    assert other.adopt(first.made()) and other.choose(PRODUCT) == TILE and other.made() == first.made()
    assert not policy().adopt([(*each[:-1], "mm") for each in first.made()])
    assert len(measured[0]) == 1


def test_the_numbers_of_a_way_reach_its_kernel(measured):
    def linear(emit, x, weight):
        return [emit(op.matmul(x, emit(op.permute_dims(weight))))]

    measured[1][TILE] = 0.5
    backend = backend_for(None)
    func = function([((160, 192), "float32"), ((192, 192), "float32")], linear)
    graph = choose_layouts(translate(func, backend, None), backend, policy())
    (call,) = [node for node in graph.nodes if isinstance(node, LibraryCall)]
    assert " ".join(map(str, (call.name, *call.attrs))) == TILE
    a, b, out = torch.randn(5, 6), torch.randn(7, 6).t(), torch.empty(5, 7)
    OUT_KERNELS[call.name]([out], [a, b], *call.attrs)  # not on a GPU: torch's own
    assert torch.equal(out, a @ b)
