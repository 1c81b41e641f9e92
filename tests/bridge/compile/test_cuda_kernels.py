"""Kernels for a GPU, run as OpenCL on the processor: the numbers of the CPU backend's."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch

from autodiff.extents import ExtentScope
from bridge.compile.cpu.backend import host_backend
from bridge.compile.cuda import row
from bridge.compile.cuda.build import cuda_source
from bridge.compile.cuda.nvrtc import compiled
from bridge.compile.cuda.row import SHORT_ROW, RowVariant, combines_columns_alone
from bridge.compile.loop_ir.graph import Concat, Operand, Value, whole
from bridge.compile.loop_ir.views import View, expand
from bridge.compile.schedule.fuse import fuse
from bridge.compile.schedule.row_plan import RowPlan
from tests.bridge.compile.cuda_graphs import GRAPHS, layer_norm_backward, softmax, strided
from tests.bridge.compile.planned_graphs import Builder, Kernels, build, inputs
from tests.cuda_plans import BACKEND, FOR_LITTLE, CudaKernels, assert_near, planned
from tests.nvrtc import ARCHES, needs_nvrtc
from tests.sampling import sampled

BACKENDS = {"large": BACKEND, "little": FOR_LITTLE}
#: Of little: rows of more threads, the most there are, rows that share a block, and elements one by one.
LITTLE = (
    "softmax 10 x 100",
    "softmax 2 x 5000",
    "softmax float64",
    "layer_norm_backward 700 x 16",
    "layer_norm_backward 100 x 1100",
    "fused_columns (3, 40, 5)",
    "strided (12, 7, 64)",
    "padded (3, 1026, 1032)",
    "mixed rows_and_columns",
)


def runs_always(case):
    size, name = case
    return size == "large" or name in LITTLE


@pytest.fixture(scope="module")
def cases():
    graphs = {name: make() for name, make in GRAPHS.items()}
    plans = {(name, size): planned(graph, BACKENDS[size]) for name, graph in graphs.items() for size in BACKENDS}
    host = {name: Kernels(graph) for name, graph in graphs.items()}
    build(*host.values())

    @cache
    def ours(always):
        return CudaKernels([made for (name, size), made in plans.items() if runs_always((size, name)) is always])

    return ours, plans, host


@pytest.mark.parametrize(("size", "name"), sampled(itertools.product(BACKENDS, GRAPHS), runs_always))
def test_numbers_are_the_cpus(size, name, cases):
    ours, plans, host = cases
    graph = host[name].graph
    given = inputs(graph)
    memory = dict(zip(graph.params, given, strict=True))
    ours(runs_always((size, name))).run(plans[name, size], memory)
    for operand, theirs in zip(graph.results, host[name](given), strict=True):
        assert_near(memory[operand.value], theirs)


def test_of_little_each_element_or_vector_has_a_thread(cases):
    _, plans, _ = cases

    def found(size):
        made = [each.plan for (_, of), all_ in plans.items() if of == size for each in all_]
        lanes = {plan.lanes for plan in made if isinstance(plan, RowPlan)}
        rows = [
            RowVariant.of(plans[name, size][0].plan) for name in ("softmax 3 x 768", "layer_norm_backward 700 x 16")
        ]
        return lanes, [(form.threads, form.lanes) for form in rows]

    assert found("large") == ({4, 8}, [(32, 4), (4, 4)])  # 8 of half types
    assert found("little") == ({1, 4}, [(256, 4), (16, 1)])


def test_casts_that_all_rows_share_take_no_registers():
    """A row's centred elements are cached; a weight's casts, equal for all rows, are not."""
    builder = Builder()
    x, weight = builder.param(700, 768), builder.param(768, dtype="bfloat16")
    total = builder.op("exp", x)
    centred = builder.op("subtract", total, builder.reduce("sum", total, 700, 768, 1, 700, 1))
    wide = builder.op("astype", Operand(weight.value, expand(weight.view, x.shape)), dtype="float32")
    scaled = builder.op("multiply", centred, wide)
    (made,) = planned(builder.graph(scaled))
    assert [made.plan.nodes[node].op for node in made.plan.cached] == ["exp"]


@pytest.mark.parametrize(("dtype", "width", "groups"), [("float32", 328, 1), ("float32", 256, 4), ("bfloat16", 328, 4)])
def test_a_row_has_a_block_of_its_own_where_a_thread_reads_much_of_it(dtype, width, groups):
    """Three vectors of two float32 tensors are 96 bytes, of half types 48."""
    builder = Builder(dtype)
    x, y = builder.param(4096, width), builder.param(4096, width)
    product = builder.op("multiply", x, y)
    total = builder.reduce("sum", product, 4096, width, 1, 4096, 1)
    (made,) = planned(builder.graph(builder.op("subtract", product, total)))
    assert RowVariant.of(made.plan).groups == groups


@pytest.mark.parametrize(("width", "rows"), [(64, 32), (256, 16), (320, 16), (640, 16), (768, 8), (1280, 8)])
def test_short_rows_whose_columns_are_reduced_share_a_block(width, rows):
    """The more of a row a thread has, the fewer threads share a block's registers: 1024 at most, 256 at least."""
    builder = Builder()
    x = builder.param(8192, width)
    total = builder.reduce("sum", x, 8192, width, 1, 8192, 1)
    centred = builder.op("subtract", x, total)
    columns = builder.reduce("sum", centred, 1, 8192, width, width)
    (made,) = planned(builder.graph(centred, columns))
    form = RowVariant.of(made.plan)
    assert form.groups == rows and 256 <= form.groups * form.threads <= 1024


@pytest.mark.parametrize(("sections", "kernels"), [(2, 1), (3, 2)])
def test_what_adds_up_columns_concatenates_two_tensors_at_most(sections, kernels):
    """Its code is repeated for each section, and neighbours in different ones wait for each other."""
    builder = Builder()
    parts = [builder.param(4096, 32) for _ in range(sections)]
    spread = [Operand(each.value, View((4096, sections, 32), (32, 0, 1), 0)) for each in parts]
    out = Value("concat", (4096, 32 * sections), "float32")
    builder.nodes.append(Concat("concat", tuple(spread), out, 32))
    both = whole(out)
    width = 32 * sections
    columns = builder.reduce("sum", both, 1, 4096, width, width)
    graph = builder.graph(both, columns)
    assert len(planned(graph)) == kernels
    assert len(fuse(graph, host_backend())) == 1


@needs_nvrtc
@pytest.mark.parametrize("arch", sampled(ARCHES, ARCHES[:1]))
def test_nvrtc_takes_every_form(arch):
    plans = {each.plan: None for make in GRAPHS.values() for each in planned(make())}
    source = cuda_source({f"k{index}": BACKEND.kernel(plan) for index, plan in enumerate(plans)}, arch)
    assert compiled(source, arch)
    assert "bridge_shuffle_xor(" in source.split("// ---- kernels")[1] and "float4" in source


@pytest.mark.parametrize(
    ("first", "second", "lanes"),
    [("bfloat16", "bfloat16", 8), ("float16", "float32", 4), ("float32", "float32", 4), ("bfloat16", "bool", 8)],
)
@pytest.mark.parametrize("shape", sampled(map(pytest.param, [(7, 33), (5, 64), (3, 12)]), [(7, 33), (3, 12)]))
def test_vectors_are_whole_accesses_of_each_large_tensor(first, second, lanes, shape):
    """Twice as many elements if all are half types; small operands do not count."""
    b = Builder(first)
    kept = b.op("where", b.param(*shape, dtype="bool"), b.param(*shape), b.param(shape[-1]), dtype=first)
    graph = b.graph(kept if second == "bool" else b.op("astype", b.op("multiply", kept, 2.0), dtype=second))
    (plan,) = plans = planned(graph)
    assert plan.plan.lanes == lanes
    given, host = inputs(graph), Kernels(graph)
    build(host)
    memory = dict(zip(graph.params, given, strict=True))
    CudaKernels([plans]).run(plans, memory)
    assert_near(memory[graph.results[0].value], host(given)[0])


def reductions(n, m):
    """Pointwise, row and column reductions of ``(n, m)``."""
    b = Builder()
    x = b.param(n, m)
    y = b.op("add", x, 1.0)
    sums = b.reduce("sum", b.op("exp", x), n, m, 1, n, 1)
    return b.graph(y, b.op("divide", x, sums), sums, b.reduce("sum", x, 1, n, m, m))


def columns_alone(n, m):
    """Pointwise, and sums and maxima of its columns: nothing of a row is combined."""
    b = Builder()
    y = b.op("multiply", b.param(n, m), b.param(m))
    return b.graph(y, b.reduce("sum", y, 1, n, m, m), b.reduce("max", y, 1, n, m, m))


def columns_of_scaled_rows(n, m):
    """As ``columns_alone``, of rows with a computed factor: each block computes it."""
    b = Builder()
    factor = b.op("exp", b.op("negative", b.param(n)))
    y = b.op("multiply", b.param(n, m), Operand(factor.value, View((n, m), (1, 0))))
    return b.graph(y, b.reduce("sum", y, 1, n, m, m))


def test_blocks_share_the_columns_of_a_task(monkeypatch):
    """One turn each, with the bits of a block that takes all of them."""
    graphs = [columns_alone(n, m) for n, m in ((70, 300), (33, 768), (9, 301), (40, 129), (300, 64))]
    graphs += [columns_of_scaled_rows(n, m) for n, m in ((70, 2000), (33, 768), (9, 1501))]
    assert all(combines_columns_alone(planned(graph)[0].plan) and len(planned(graph)) == 1 for graph in graphs)
    found = []
    for alone in (True, False):
        if not alone:
            monkeypatch.setattr(row, "_tiles", lambda plan, form, number: None)
        plans = [planned(graph) for graph in graphs]
        ours = CudaKernels(plans)
        for graph, each in zip(graphs, plans, strict=True):
            memory = dict(zip(graph.params, inputs(graph), strict=True))
            ours.run(each, memory)
            found.append([memory[operand.value] for operand in graph.results])
    half = len(graphs)
    assert all(
        torch.equal(a, b)
        for one, all_ in zip(found[:half], found[half:], strict=True)
        for a, b in zip(one, all_, strict=True)
    )
    host = [Kernels(graph) for graph in graphs]
    build(*host)
    for each, results in zip(host, found, strict=False):
        for ours, theirs in zip(results, each(inputs(each.graph)), strict=True):
            assert_near(ours, theirs)


@pytest.mark.parametrize(
    ("make", "samples", "sizes"),
    [
        (reductions, {"n": 9, "m": 70}, [(2, 2), (300, 40), (3, 700)]),
        (layer_norm_backward, {"rows": 900, "columns": 70}, [(2, 5), (70, 300), (800, 64)]),
        (lambda n: softmax(n, 64), {"n": 9}, [(2,), (300,)]),
        (lambda a, b: strided(a, b, 64), {"a": 3, "b": 9}, [(2, 4), (3, 7)]),
        (columns_alone, {"n": 9, "m": 70}, [(16, 3000), (40, 33)]),
        (lambda m: softmax(9, m), {"m": 70}, [(3,), (189,), (SHORT_ROW,), (SHORT_ROW + 1,)]),
    ],
)
def test_sizes_of_the_launch(make, samples, sizes):
    scope = ExtentScope()
    graph = make(**{name: scope.symbol(name, sample) for name, sample in samples.items()})
    plans = planned(graph)
    cases = [dict(zip(samples, each, strict=True)) for each in sizes]
    ours, fixed = CudaKernels([plans]), [Kernels(make(**values)) for values in cases]
    build(*fixed)
    for host, values in zip(fixed, cases, strict=True):
        given = inputs(host.graph)
        memory = dict(zip(graph.params, given, strict=True))
        ours.run(plans, memory, lambda extents, values=values: scope.compiled(extents)(values))
        for operand, expected in zip(graph.results, host(given), strict=True):
            assert_near(memory[operand.value], expected)
