"""A launch's arguments to kernels for all sizes: numbers to compute with, indices, whether to use threads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tvm_ffi import structural_equal

from autodiff.extents import Dim, ExtentScope, sample_of
from bridge.compile.cpu.products import CpuProducts
from bridge.compile.cpu.threads import launcher
from bridge.compile.loop_ir.graph import Graph
from bridge.compile.loop_ir.operations import FIELDS
from bridge.compile.schedule.products import GENERATED
from tests.bridge.compile.planned_graphs import Builder, Kernels, assert_static_bits, build, symbolic
from tests.bridge.compile.symbolic import SAMPLE, Symbolic
from tests.bridge.compile.test_symbolic import CASES
from tests.bridge.compile.test_symbolic_columns import batched_columns, few_rows, norm_backward, rows
from tests.bridge.compile.test_symbolic_rows import softmax


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16", "int64", "int32", "uint8", "bool"])
def test_a_size_as_a_number(dtype):
    """Rounded as torch rounds it, and whole where the indices of the kernel are int32."""

    def make(n: Dim) -> Graph:
        b = Builder(dtype)
        return b.graph(b.op("add", b.param(5), n * n * 7 - 1))

    kernels = symbolic(make, n=40)
    build(kernels)
    assert kernels.planned[0].plan.index_type == "int32"
    torch_type = getattr(torch, dtype)
    for n in (2, 50, 5793, 99_999):
        number = n * n * 7 - 1
        expected = torch.tensor(number, dtype=torch.int64).to(torch_type).expand(5)
        (result,) = kernels([torch.zeros(5, dtype=torch_type)], n=n)
        assert torch.equal(result, expected.contiguous()), n


@pytest.mark.parametrize("make", [softmax, batched_columns, few_rows], ids=lambda make: make.__name__)
def test_wide_indices_for_a_large_sample(make):
    ours = assert_static_bits(make, [{"n": n, "m": 3} for n in (2, 17, 64)], n=70_000, m=70_000)
    assert {each.plan.index_type for each in ours.planned} == {"int64"}
    assert {each.plan.index_type for each in symbolic(make, n=70, m=70).planned} == {"int32"}


@pytest.mark.parametrize("make", [softmax, rows, norm_backward], ids=lambda make: make.__name__)
def test_the_sample_leaves_no_trace_in_a_kernel(make):
    few, many = symbolic(make, n=40, m=12), symbolic(make, n=130, m=64)
    assert all(structural_equal(a, b) for a, b in zip(few.functions, many.functions, strict=True))


def test_the_tasks_of_a_product_follow_the_sizes(monkeypatch):
    """Blocks that were right for the sample alone would leave threads idle at another size."""
    monkeypatch.setattr(CpuProducts, "choose", lambda policy, product: GENERATED)
    monkeypatch.setattr("bridge.compile.cpu.backend.CpuBackend.threads", lambda backend: 2)
    shapes, body = CASES["perceptron"]
    made = Symbolic(shapes, body)
    blocks = []
    for n in (SAMPLE, 5, 300, 1440):
        bound, static = (
            [step.scalars for step in program.steps if step.name == "product_float32"]
            for program in (made.program.at({"n": n}), made.static({"n": n}))
        )
        assert len(bound) == 3 and bound == static
        blocks.append([descriptor[FIELDS.index("block_rows")] for descriptor in bound])
        made.assert_same_bits(n=n)
    assert all(len(set(rows)) > 1 for rows in list(zip(*blocks, strict=True))[:2]), blocks
    assert all("2147483647" in guard for guard in made.guards)


def test_scratch_memory_follows_the_sizes():
    (planned,) = symbolic(softmax, n=40, m=12).planned
    (row,) = planned.scratch
    scope = row.shape[0].scope
    assert sample_of(row.numel) == 12 * 48  # a row for each task, in whole vectors
    assert scope.value(row.numel, {"n": 100, "m": 3}) == 3 * 112
    assert scope.value(row.numel, {"n": 16, "m": 10_000}) <= 64 * 16


@pytest.mark.skipif(launcher() is None, reason="torch's process has no OpenMP run time")
def test_threads_are_as_they_were():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        kernels = symbolic(softmax, n=40, m=12)
        build(kernels)
        for n, m in ((3, 2), (200, 300)):
            x = torch.randn(m, n)
            torch.testing.assert_close(kernels([x], n=n, m=m)[0], x.softmax(1))
            assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_work_that_is_little_for_all_sizes_is_one_task():
    def make(n: Dim) -> Graph:
        b = Builder()
        return b.graph(b.op("exp", b.param(n, 300)))

    assert symbolic(make, n=4, high=8).planned[0].plan.walk.parallel is False
    assert symbolic(make, n=4).planned[0].plan.walk.parallel is not False


def test_numpy_agrees_about_a_mean():
    def make(n: Dim) -> Graph:
        b = Builder("float64")
        x = b.param(6, n)
        return b.graph(b.op("divide", b.reduce("sum", x, 6, n, 1, 6), n))

    kernels = symbolic(make, n=40)
    build(kernels)
    for n in (2, 17, 1000):
        x = torch.randn(6, n, dtype=torch.float64)
        np.testing.assert_allclose(kernels([x], n=n)[0].numpy(), x.numpy().mean(1), rtol=1e-12)


def test_equal_scopes_are_one_kernel():
    scope = ExtentScope()
    n = scope.symbol("length", 40)
    a, b = (Kernels(softmax(n * k, 12), scope) for k in (1, 3))
    assert structural_equal(a.functions[0], b.functions[0])
    assert scope.guards == ()
