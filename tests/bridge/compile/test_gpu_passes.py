"""Passes that a GPU's backend asks for: casts where they are read; golden graphs, and none on a CPU."""

from __future__ import annotations

from tvm import relax
from tvm.relax import op

from bridge.compile import backend_for
from bridge.compile.cpu.backend import host_backend
from bridge.compile.loop_ir.graph import Graph, eliminate_dead_code
from bridge.compile.passes.cheap import cast_where_read, recompute_row_values
from bridge.compile.passes.choose_layouts import choose_layouts
from bridge.compile.schedule.fuse import fuse
from bridge.compile.translate import translate
from tests.bridge.compile.graph_text import text
from tests.bridge.compile_helpers import function

GPU = backend_for({"kind": "cuda", "arch": "sm_90"})


def translated(params, body) -> Graph:
    return choose_layouts(translate(function(params, body), GPU), GPU, GPU.products(1, False))


def biased(dtype):
    def body(emit, x, bias) -> list[relax.Var]:
        return [emit(op.add(x, emit(op.astype(bias, dtype))))]

    return body


def test_a_bias_is_cast_where_it_is_added():
    graph = translated([((64, 8), "bfloat16"), ((8,), "float32")], biased("bfloat16"))
    assert text(graph) == ["0 = astype(p1)", "1 = add(p0, 0[64,8:0,1+0])", "return 1"]
    expected = ["0 = astype(p1[64,8:0,1+0])", "1 = add(p0, 0)", "return 1"]
    assert text(eliminate_dead_code(cast_where_read(graph, GPU), GPU)) == expected
    assert cast_where_read(graph, host_backend()) is graph


def test_what_is_not_small_is_cast_once():
    graph = translated([((4, 8), "bfloat16"), ((8,), "float32")], biased("bfloat16"))
    assert text(cast_where_read(graph, GPU)) == text(graph)


def normalized(emit, x, narrow, variance) -> list[relax.Var]:
    """One number for each row, for rows of 32 and of 8."""
    root = emit(op.rsqrt(emit(op.add(variance, variance))))
    return [emit(op.multiply(each, root)) for each in (x, narrow)]


def test_a_row_value_is_computed_in_each_kernel_that_reads_it():
    graph = translated([((8, 32), "float32"), ((8, 8), "float32"), ((8, 1), "float32")], normalized)
    before = ["0 = add(p2, p2)", "1 = rsqrt(0)", "2 = multiply(p0, 1[8,32:1,0+0])", "3 = multiply(p1, 1[8,8:1,0+0])"]
    assert text(graph) == [*before, "return 2, 3"]
    made = eliminate_dead_code(recompute_row_values(graph, GPU), GPU)
    ways = [*before[:3], "3 = add(p2, p2)", "4 = rsqrt(3)", "5 = multiply(p1, 4[8,8:1,0+0])"]
    assert text(made) == [*ways, "return 2, 5"]
    assert [[len(group.sources) for group in fuse(each, GPU)] for each in (graph, made)] == [[0, 1], [0, 0]]
    assert recompute_row_values(graph, host_backend()) is graph


def test_a_row_value_of_rows_of_one_length_is_computed_once():
    graph = translated([((8, 32), "float32"), ((8, 32), "float32"), ((8, 1), "float32")], normalized)
    assert text(recompute_row_values(graph, GPU)) == text(graph)


def test_a_kernel_that_ends_late_waits_for_what_it_adds():
    """It begins early; steps in between are not delayed until then."""

    def body(emit, early, x, weight) -> list[relax.Var]:
        first = emit(op.exp(early))
        second = emit(op.matmul(x, weight))
        alone = emit(op.matmul(weight, weight))
        last = emit(op.matmul(second, weight))
        return [emit(op.add(first, last)), alone]

    graph = translated([((4, 8), "float32"), ((4, 8), "float32"), ((8, 8), "float32")], body)
    groups = fuse(graph, GPU)
    assert [[getattr(node, "op", "product") for node in group.nodes] for group in groups] == [
        ["product"],
        ["product"],
        ["product"],
        ["exp", "add"],
    ]
    assert groups[1].nodes[0].outs[0] is graph.results[1].value
