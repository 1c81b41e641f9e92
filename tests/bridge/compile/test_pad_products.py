"""Padded products: matrices with zeros behind, written by the kernels that make them; numbers and gradients."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.export import Dim
from tvm import relax
from tvm.relax import op

from bridge import add_tvm_dispatch, stats
from bridge.base.session import SESSION
from bridge.compile import Launch, backend_for
from bridge.compile.cpu.products import CpuProducts
from bridge.compile.cuda.products import CudaProducts
from bridge.compile.loop_ir.graph import Graph, Pad
from bridge.compile.passes.choose_layouts import choose_layouts
from bridge.compile.passes.pad_products import pad_products
from bridge.compile.schedule.products import ProductShape
from bridge.compile.translate import translate
from tests.bridge.compare import check_module
from tests.bridge.compile.graph_text import text
from tests.bridge.compile_helpers import function, program, run
from tests.sampling import sampled

GPU = backend_for({"kind": "cuda", "arch": "sm_90"})
PRODUCTS = GPU.products(1, False)


def placed(params, body, unit: int = 8) -> Graph:
    neutral = pad_products(translate(function(params, body), GPU), lambda product: unit)
    return choose_layouts(neutral, GPU, PRODUCTS)


def head(emit, hidden, weight, bias) -> list[relax.Var]:
    logits = emit(op.add(emit(op.matmul(hidden, emit(op.permute_dims(weight)))), bias))
    return [emit(op.exp(logits))]


def backward(emit, hidden, weight, logits) -> list[relax.Var]:
    """Two products read one gradient."""
    grad = emit(op.exp(logits))
    return [emit(op.matmul(grad, weight)), emit(op.matmul(emit(op.permute_dims(grad)), hidden))]


def test_a_result_is_a_part_of_a_wider_one():
    graph = placed([((16, 8), "bfloat16"), ((13, 8), "bfloat16"), ((13,), "bfloat16")], head)
    assert text(graph) == [
        "0 = library pad(p1)",
        "1 = library mm(p0, 0[8,16:1,8+0])",
        "2 = add(1[16,13:16,1+0], p2[16,13:0,1+0])",
        "3 = exp(2)",
        "return 3",
    ]


def test_a_kernel_writes_the_zeros_once_for_all_products():
    params = [((16, 8), "bfloat16"), ((13, 8), "bfloat16"), ((16, 13), "bfloat16")]
    graph = placed(params, backward)
    assert text(graph) == [
        "0 = exp(p2)",
        "1 = pad(0)",
        "2 = library pad(p1)",
        "3 = library mm(1, 2)",
        "4 = library mm(1[16,16:1,16+0], p0)",
        "5 = copy(4[13,8:8,1+0])",
        "return 3, 5",
    ]
    (pad,) = [node for node in graph.nodes if isinstance(node, Pad)]
    assert pad.columns == 13 and pad.out.shape == (16, 16)


@pytest.mark.parametrize("unit", [1, 13])
def test_what_fits_stays_as_it_is(unit):
    params = [((26, 13), "bfloat16"), ((13, 13), "bfloat16"), ((13,), "bfloat16")]
    neutral = translate(function(params, head), GPU)
    assert pad_products(neutral, lambda product: unit) is neutral


@pytest.mark.parametrize(
    ("dtype", "tf32", "extents", "unit"),
    [
        ("bfloat16", False, (2048, 1001, 2048), 8),
        ("float16", False, (2048, 1001, 2048), 8),
        ("float32", True, (2048, 1001, 2048), 4),
        ("float32", False, (2048, 1001, 2048), 1),
        ("float64", True, (2048, 1001, 2048), 1),
        ("bfloat16", False, (64, 1001, 2048), 1),
        ("bfloat16", False, (600, 1001, 600), 1),
    ],
)
def test_which_products_are_padded_on_a_gpu(dtype, tf32, extents, unit):
    assert CudaProducts(tf32).unit(ProductShape(dtype, 1, *extents)) == unit


class Head(nn.Module):
    """Logits of a vocabulary, their loss; the embedding and the head share a weight."""

    def __init__(self, tied: bool = False, bias: bool = True, words: int = 13):
        super().__init__()
        self.embedding = nn.Embedding(words, 6)
        self.head = nn.Linear(6, words, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight
        self.loss = nn.CrossEntropyLoss()

    def forward(self, tokens):
        logits = self.head(torch.tanh(self.embedding(tokens)))
        return self.loss(logits.flatten(0, 1), tokens.flatten()), logits


class Widths(nn.Module):
    """Every extent of a product is odd; a product reads a product."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3, bias=False), nn.Linear(3, 11))

    def forward(self, tokens):
        return torch.softmax(self.layers(tokens.double()[..., None].expand(-1, -1, 5)), -1)


MODULES = {
    "head": Head,
    "tied": lambda: Head(True),
    "no bias": lambda: Head(bias=False, words=31),
    "widths": Widths,
}


@pytest.mark.parametrize(
    ("unit", "name"), sampled(itertools.product([4, 8], MODULES), [(8, name) for name in MODULES if name != "tied"])
)
def test_numbers_and_gradients(unit, name, monkeypatch):
    padded = []

    def asked(policy, product):
        padded.append(product)
        return unit

    for policy in (CpuProducts, CudaProducts):  # that of the device under test
        monkeypatch.setattr(policy, "unit", asked)
    SESSION.reset("programs", "lowerings")
    check_module(MODULES[name], lambda: torch.randint(0, 13, (3, 5)), dtype=torch.float64)
    SESSION.reset("programs", "lowerings")
    assert padded


def test_one_entry_for_all_sizes(monkeypatch):
    """A dynamic dimension is not contiguous in memory, and is not padded."""
    monkeypatch.setattr(CpuProducts, "unit", lambda policy, product: 8)
    SESSION.reset("programs", "lowerings")
    torch.manual_seed(0)
    eager = Head(True).double()
    ours, lengths = copy.deepcopy(eager), {0: Dim("rows", min=2, max=64), 1: Dim("length", min=2, max=64)}
    add_tvm_dispatch(ours, torch.randint(13, (3, 5)), dynamic_shapes={"tokens": lengths})
    for shape in ((3, 5), (2, 13), (13, 2), (8, 8)):
        tokens, gradients = torch.randint(13, shape), []
        for each in (ours, eager):
            each.zero_grad()
            loss, _ = each(tokens)
            loss.backward()
            gradients.append([parameter.grad for parameter in each.parameters()])
        torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)
    (entry,) = stats(ours).entries
    SESSION.reset("programs", "lowerings")
    assert stats(ours).hits == 4
    assert any("pad" in step.ops for step in entry.backward.steps if isinstance(step, Launch))


def test_an_infinite_number_meets_no_zero(monkeypatch):
    """Padding of the inner axis: both factors have zeros there."""
    monkeypatch.setattr(CpuProducts, "unit", lambda policy, product: 8)
    a, b = torch.ones(3, 13), torch.ones(13, 5)
    a[1, 2], b[12, 4] = torch.inf, torch.inf
    SESSION.reset("programs")
    (found,) = run([a, b], lambda emit, a, b: [emit(op.matmul(a, b))])
    SESSION.reset("programs")
    assert torch.equal(found, a @ b)


SHAPES, TYPES = [(3, 13), (5, 30), (300, 66), (2, 1)], ["float32", "float64", "bfloat16"]


@pytest.mark.parametrize(
    ("normalized", "shape", "dtype"),
    sampled(
        itertools.product([False, True], SHAPES, TYPES),
        lambda case: case[1:] != ((300, 66), "float64"),
    ),
    ids=str,
)
def test_a_kernels_zeros(normalized, shape, dtype, monkeypatch):
    """Zeros behind rows of vectors, with a rest and without; from a kernel that reduces the row, and another."""
    monkeypatch.setattr(CpuProducts, "unit", lambda policy, product: 16)

    def body(emit, x, weight) -> list[relax.Var]:
        return [emit(op.matmul(emit(op.nn.softmax(x)) if normalized else emit(op.negative(x)), weight))]

    columns = shape[1]
    x, weight = (torch.randn(extents).to(getattr(torch, dtype)) for extents in (shape, (columns, 4)))
    SESSION.reset("programs")
    compiled = program([(tuple(each.shape), dtype) for each in (x, weight)], body)
    SESSION.reset("programs")
    assert any("pad" in step.ops for step in compiled.steps if isinstance(step, Launch))
    (found,) = compiled([x, weight])
    wide = x.double()
    expected = (torch.softmax(wide, -1).to(x.dtype).double() if normalized else -wide) @ weight.double()
    tolerance = {"float32": 1e-5, "float64": 1e-12, "bfloat16": 2e-2}[dtype]
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance * columns**0.5)
