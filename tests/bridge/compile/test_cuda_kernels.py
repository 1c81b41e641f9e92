"""Kernels for a GPU, run as OpenCL on the processor: the numbers of the CPU backend's."""

from __future__ import annotations

import pytest

from bridge.compile.cuda.build import cuda_source
from bridge.compile.cuda.nvrtc import compiled
from tests.bridge.compile.cuda_graphs import GRAPHS
from tests.bridge.compile.planned_graphs import Kernels, build, inputs
from tests.cuda_plans import BACKEND, CudaKernels, assert_near, planned
from tests.nvrtc import ARCHES, needs_nvrtc


@pytest.fixture(scope="module")
def cases():
    graphs = {name: make() for name, make in GRAPHS.items()}
    plans = {name: planned(graph) for name, graph in graphs.items()}
    host = {name: Kernels(graph) for name, graph in graphs.items()}
    ours = CudaKernels(list(plans.values()))
    build(*host.values())
    return ours, plans, host


@pytest.mark.parametrize("name", GRAPHS)
def test_numbers_are_the_cpus(name, cases):
    ours, plans, host = cases
    graph = host[name].graph
    given = inputs(graph)
    memory = dict(zip(graph.params, given, strict=True))
    ours.run(plans[name], memory)
    for operand, theirs in zip(graph.results, host[name](given), strict=True):
        assert_near(memory[operand.value], theirs)


@needs_nvrtc
@pytest.mark.parametrize("arch", ARCHES)
def test_nvrtc_takes_every_form(arch):
    plans = {each.plan: None for make in GRAPHS.values() for each in planned(make())}
    source = cuda_source({f"k{index}": BACKEND.kernel(plan) for index, plan in enumerate(plans)}, arch)
    assert compiled(source, arch)
    assert "bridge_shuffle_xor(" in source.split("// ---- kernels")[1] and "float4" in source
