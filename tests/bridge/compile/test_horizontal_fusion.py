"""Horizontal fusion: a valid order of execution, the results of separate launches, a layer's casts in one launch."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from autodiff.extents import ExtentScope
from bridge.compile.cuda.limits import LIMITS
from bridge.compile.loop_ir.graph import Concat, LibraryCall, Value, eliminate_dead_code, whole
from bridge.compile.passes.sections import recompute_sections
from bridge.compile.schedule import horizontal_fusion
from bridge.compile.schedule.fuse import fuse
from bridge.compile.schedule.horizontal_fusion import plan_horizontal_fusion, together
from tests.bridge.compile.planned_graphs import Builder, Kernels, build, inputs
from tests.cuda_plans import BACKEND, CudaKernels, assert_near


def several(n, m):
    """Casts, a transposed copy, a broadcast sum, a flat space with a tail: nothing reads another."""
    b = Builder()
    half = b.op("astype", b.param(n, m), dtype="bfloat16")
    x, y = b.param(n, 4, m), b.param(m)
    swapped = b.op("add", b.transposed(x, 1, 0, 2), y)
    odd = b.op("multiply", b.op("astype", b.param(n, 7), dtype="float16"), 3.0)
    sums = b.op("exp", b.param(3, m, dtype="float64"))
    return b.graph(half, swapped, odd, sums)


def launched(graph):
    """The plan of all groups, which are one step."""
    groups = fuse(graph, BACKEND)
    (step,) = together(groups, BACKEND)
    assert len(step) == len(groups) == 4
    return plan_horizontal_fusion(step, {operand.value for operand in graph.results}, BACKEND)


def assert_as_on_the_host(cases, plans):
    """Asserts that the kernels of each graph's plans compute the CPU's results."""
    ours, host = CudaKernels(plans), list(map(Kernels, cases))
    build(*host)
    for graph, each, theirs in zip(cases, ours.graphs, host, strict=True):
        given = inputs(graph)
        memory = dict(zip(graph.params, given, strict=True))
        ours.run(each, memory)
        for operand, expected in zip(graph.results, theirs(given), strict=True):
            assert_near(memory[operand.value], expected)


def test_numbers():
    cases = [several(n, m) for n, m in ((5, 33), (40, 64), (300, 12))]
    assert_as_on_the_host(cases, [[launched(graph)] for graph in cases])


def test_sizes_of_the_launch():
    scope, samples = ExtentScope(), {"n": 9, "m": 70}
    graph = several(*(scope.symbol(name, sample) for name, sample in samples.items()))
    cases = [dict(zip(samples, each, strict=True)) for each in ((2, 5), (70, 64))]
    plans = [launched(graph)]
    ours, fixed = CudaKernels([plans]), [Kernels(several(**values)) for values in cases]
    build(*fixed)
    for host, values in zip(fixed, cases, strict=True):
        given = inputs(host.graph)
        memory = dict(zip(graph.params, given, strict=True))
        ours.run(plans, memory, lambda extents, values=values: scope.compiled(extents)(values))
        for operand, expected in zip(graph.results, host(given), strict=True):
            assert_near(memory[operand.value], expected)


def gates(n, m):
    """A concatenation of a few operators' results, and another value made of the same results."""
    b = Builder()
    x, y, z = (b.param(n, m) for _ in range(3))
    product = b.op("multiply", x, b.op("tanh", y))
    parts = [product, b.op("exp", b.op("multiply", product, z)), b.op("subtract", z, product)]
    beside = b.op("multiply", parts[1], product)
    joined = Value("joined", (n, 3 * m), "float32")
    spread = [b.windowed(part, (n, 3, m), (m, 0, 1), 0) for part in parts]
    b.nodes.append(Concat("concat", tuple(spread), joined, m))
    graph = recompute_sections(b.graph(whole(joined), beside), BACKEND)
    return eliminate_dead_code(graph, BACKEND)


def test_a_small_concatenation_is_launched_with_what_is_made_beside_it():
    cases = [gates(n, m) for n, m in ((9, 8), (64, 36))]
    plans = []
    for graph in cases:
        groups = fuse(graph, BACKEND)
        (step,) = together(groups, BACKEND)
        assert len(step) == 2
        plans.append([plan_horizontal_fusion(step, {operand.value for operand in graph.results}, BACKEND)])
    assert_as_on_the_host(cases, plans)


def test_a_large_concatenation_reads_what_kernels_made():
    graph = gates(1024, 128)
    assert len(together(fuse(graph, BACKEND), BACKEND)) == 2


def product(b, *operands):
    out = Value("product", operands[0].shape, "float32")
    b.nodes.append(LibraryCall("mm", operands, (out,)))
    return whole(out)


def projections(n):
    """Products of one tensor, to each of which something is added."""
    b = Builder()
    x = b.param(n, 16)
    return b.graph(*(b.op("add", product(b, x, b.param(16, 16)), b.param(16)) for _ in range(3)))


@pytest.mark.parametrize(("rows", "steps"), [(24, 4), (2**17, 6)])
def test_small_products_go_before_what_is_added_to_each(rows, steps):
    found = together(fuse(projections(rows), BACKEND), BACKEND)
    assert len(found) == steps and len(found[-1]) == (3 if steps == 4 else 1)


def test_a_small_reduction_goes_before_what_is_copied_beside_its_result():
    b = Builder()
    x, y = b.param(24, 16), b.param(40, 8)
    copied = b.op("copy", b.transposed(y, 1, 0))
    total = b.reduce("sum", x, 1, 24, 16, 16)
    found = together(fuse(b.graph(copied, b.op("exp", total)), BACKEND), BACKEND)
    assert [len(step) for step in found] == [1, 2]


def test_what_nobody_reads_lets_only_so_many_pass(monkeypatch):
    """Gradients that are copied: their reader is not in the program."""

    def places(reach):
        monkeypatch.setattr(horizontal_fusion, "_REACH", reach)
        b = Builder()
        x, made = b.param(24, 16), []
        for _ in range(12):
            x = product(b, x, b.param(16, 16))
            made.append(b.op("exp", x))
        steps = together(fuse(b.graph(*made), BACKEND), BACKEND)
        kinds = [(place, type(group.nodes[0])) for place, step in enumerate(steps) for group in step]
        return [place for place, kind in kinds if kind is not LibraryCall]

    assert min(places(100)) == 12
    found = places(3)
    assert len(found) == 12 and all(place <= index + 8 for index, place in enumerate(found)), found


def drawn(seed: int):
    """Point-wise operators, sums and transpositions of earlier values, in any order."""
    draw, b = random.Random(seed), Builder()
    values = [b.param(24, 16) for _ in range(3)]
    for _ in range(draw.randrange(3, 30)):
        x = draw.choice(values)
        match draw.randrange(5):
            case 4:
                made = product(b, x, b.transposed(draw.choice(values), 1, 0), draw.choice(values))
            case 0:
                made = b.op("add", x, draw.choice(values))
            case 1:
                made = b.op("multiply", b.op("astype", x, dtype="float16"), 2.0)
                made = b.op("astype", made, dtype="float32")
            case 2:
                made = b.op("exp", b.reshaped(b.op("copy", b.transposed(x, 1, 0)), 24, 16))
            case _:
                made = b.op("subtract", x, b.reduce("max", x, 24, 16, 1, 24, 1))
        values.append(made)
    return b.graph(*draw.sample(values[3:], draw.randrange(1, len(values) - 2)))


@pytest.mark.parametrize("most", [1, 2, 8])
def test_what_a_step_reads_is_made_before(most):
    backend, joined = replace(BACKEND, limits=LIMITS.having(together=most)), 0
    for seed in range(60):
        groups = fuse(drawn(seed), backend)
        steps = together(groups, backend)
        assert sorted(map(id, groups)) == sorted(id(group) for step in steps for group in step)
        made = set()
        for step in steps:
            assert len(step) <= most
            joined += len(step) > 1
            for group in step:
                assert all(op.value in made for _, op in group.reads() if op.value.source == "node")
            made.update(value for group in step for value in group.made)
    assert bool(joined) is (most > 1)


def test_a_layers_casts_are_one_launch():
    b = Builder()
    weights = [b.op("astype", b.param(48, 8 * width), dtype="bfloat16") for width in range(1, 7)]
    (step,) = together(fuse(b.graph(*weights), BACKEND), BACKEND)
    assert len(step) == 6
