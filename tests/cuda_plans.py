"""Plans of a GPU on a processor: loop graphs → kernels for CUDA → OpenCL on PoCL → results beside the CPU backend's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from bridge.compile.cuda.backend import CudaBackend, generate
from bridge.compile.cuda.limits import LIMITS, ORDER
from bridge.compile.loop_ir.graph import Graph, Reduction, Value
from bridge.compile.schedule.fuse import fuse
from bridge.compile.schedule.plan_rows import Planned, plan_rows
from bridge.compile.schedule.products import plan_columns
from tests.opencl import OpenClKernels

FOR_LITTLE = CudaBackend(arch="sm_90")

#: Takes every tensor for a large one, so that small tests see the vectors and rows of large ones.
BACKEND = CudaBackend(replace(ORDER, small_rows=0), LIMITS.having(single_elements=0), arch="sm_90")

#: Difference of two orders of summation, relative to the largest number of a result.
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-12, torch.float16: 2e-2, torch.bfloat16: 5e-2}


def planned(graph: Graph, backend: CudaBackend = BACKEND) -> list[Planned]:
    """The plans of a graph's kernels, in order, as the compiler makes them for a GPU."""
    groups = fuse(graph, backend)
    stored = {operand.value for operand in graph.results}
    for group in groups:
        stored |= {operand.value for _, operand in group.reads()}
    plans = []
    for group in groups:
        node = group.nodes[0]
        alone = isinstance(node, Reduction) and not group.fusable
        plans.append(plan_columns(node, backend) if alone else plan_rows(group, stored, backend))
    return plans


class CudaKernels:
    """Kernels of planned graphs, compiled together."""

    def __init__(self, graphs: Sequence[Sequence[Planned]]) -> None:
        self.graphs = graphs
        plans = {each.plan: None for graph in graphs for each in graph}
        self.index = {plan: index for index, plan in enumerate(plans)}
        self.code = OpenClKernels([generate(plan, plain=True) for plan in plans])

    def run(
        self,
        graph: Sequence[Planned],
        memory: dict[Value, torch.Tensor],
        number: Callable[[tuple], tuple[int, ...]] = tuple,
    ) -> None:
        """Runs a graph's kernels; ``memory`` has the inputs, and the results afterwards.

        ``number``: extents as numbers.
        """
        for each in graph:
            made = (*each.outputs, *each.scratch)
            for value in made:
                memory[value] = torch.full(number(value.shape), 3, dtype=getattr(torch, value.dtype))
            arrays = [array(memory[value]) for value in (*each.inputs, *made)]
            self.code(self.index[each.plan], arrays, number(each.scalars))


def array(tensor: torch.Tensor) -> np.ndarray:
    """A tensor's memory as a kernel for CUDA sees it."""
    if tensor.dtype in (torch.float16, torch.bfloat16):
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return (tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor).numpy()


def assert_near(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Equal but for the order of sums; integers are equal."""
    assert ours.dtype is theirs.dtype
    ours, theirs = ours.reshape(-1), theirs.reshape(-1)
    if not ours.is_floating_point():
        assert torch.equal(ours, theirs)
        return
    finite = theirs[theirs.isfinite()].double().abs()
    scale = max(1.0, float(finite.max())) if len(finite) else 1.0
    torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE[ours.dtype] * scale, equal_nan=True)
