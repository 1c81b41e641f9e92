"""Kernels for a GPU, run as OpenCL on the processor: the numbers of the CPU backend's."""

from __future__ import annotations

import pytest

from tests.bridge.compile.cuda_graphs import GRAPHS
from tests.bridge.compile.planned_graphs import Kernels, build, inputs
from tests.cuda_plans import CudaKernels, assert_near, planned


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
