"""Loop graphs run kernel by kernel: their extents numbers, or symbolic and evaluated for one call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from autodiff.extents import Dim, Extent, ExtentScope
from bridge.compile.backend import Built
from bridge.compile.cpu.backend import host_backend
from bridge.compile.loop_ir.graph import Graph, Operand, Pad, Pointwise, Reduction, Scalar, Value, whole
from bridge.compile.loop_ir.views import View, dense, expand, permute, reshape
from bridge.compile.schedule.fuse import fuse
from bridge.compile.schedule.plan_rows import Planned, plan_rows
from bridge.compile.schedule.products import plan_columns


@dataclass
class Builder:
    """A graph under construction; operands are broadcast as numpy does."""

    dtype: str = "float32"
    params: list[Value] = field(default_factory=list)
    nodes: list = field(default_factory=list)

    def param(self, *shape: Dim, dtype: str | None = None) -> Operand:
        value = Value(f"p{len(self.params)}", shape, dtype or self.dtype, "param")
        self.params.append(value)
        return whole(value)

    def op(self, name: str, *operands: Operand | float | Extent, dtype: str | None = None) -> Operand:
        """A point-wise operator on operands of the first one's shape or broadcast to it."""
        shape = operands[0].shape
        read = [
            Operand(each.value, expand(each.view, shape))
            if isinstance(each, Operand)
            else Scalar(each, operands[0].dtype)
            for each in operands
        ]
        out = Value(f"v{len(self.nodes)}", shape, dtype or operands[0].dtype)
        self.nodes.append(Pointwise(name, tuple(read), out))
        return whole(out)

    def reduce(self, op: str, x: Operand, outer: Dim, reduced: Dim, inner: Dim, *shape: Dim) -> Operand:
        out = Value(f"v{len(self.nodes)}", shape, x.dtype)
        self.nodes.append(Reduction(op, x, outer, reduced, inner, out))
        return whole(out)

    def pad(self, x: Operand, columns: Dim) -> Operand:
        """A matrix with zeros behind its rows."""
        out = Value(f"v{len(self.nodes)}", (*x.shape[:-1], columns), x.dtype)
        self.nodes.append(Pad("pad", (x,), out))
        return whole(out)

    def transposed(self, x: Operand, *axes: int) -> Operand:
        return Operand(x.value, permute(x.view, axes))

    def reshaped(self, x: Operand, *shape: Dim) -> Operand:
        view = reshape(x.view, shape)
        assert view is not None
        return Operand(x.value, view)

    def windowed(self, x: Operand, shape: Sequence[Dim], strides: Sequence[Dim], offset: Dim) -> Operand:
        return Operand(x.value, View(tuple(shape), tuple(strides), offset))

    def graph(self, *results: Operand) -> Graph:
        return Graph(self.params, {}, self.nodes, list(results))


class Kernels:
    """A graph's kernels, once :func:`build` made them; called with the inputs and the sizes of the extents."""

    def __init__(self, graph: Graph, scope: ExtentScope | None = None) -> None:
        self.graph, self.scope = graph, scope or ExtentScope()
        backend = host_backend()
        groups = fuse(graph, backend)
        stored = {operand.value for operand in graph.results}
        for group in groups:
            stored |= {operand.value for _, operand in group.reads()}
        self.planned: list[Planned] = []
        for group in groups:
            node = group.nodes[0]
            alone = isinstance(node, Reduction) and not group.fusable
            self.planned.append(plan_columns(node, backend) if alone else plan_rows(group, stored, backend))
        self.functions = [backend.kernel(each.plan) for each in self.planned]
        self.code: list[Built] = []

    def __call__(self, inputs: Sequence[torch.Tensor], **sizes: int) -> list[torch.Tensor]:
        memory = dict(zip(self.graph.params, inputs, strict=True))
        for planned, built in zip(self.planned, self.code, strict=True):
            for value in (*planned.outputs, *planned.scratch):
                shape = self.scope.compiled(value.shape)(sizes)
                memory[value] = torch.full(shape, 3, dtype=getattr(torch, value.dtype))
            scalars = torch.tensor(self.scope.compiled(planned.scalars)(sizes), dtype=torch.int64)
            where = [ctypes.c_void_p(scalars.data_ptr())] if len(scalars) else []
            tensors = [memory[v] for v in (*planned.inputs, *planned.outputs, *planned.scratch)]
            built.function(*tensors, *where)
        results = []
        for operand in self.graph.results:
            assert operand.view == dense(operand.value.shape)
            results.append(memory[operand.value])
        return results


def symbolic(make: Callable[..., Graph], high: int | None = None, **samples: int) -> Kernels:
    """The kernels of ``make(**extents)``, which must answer no question for the samples alone."""
    scope = ExtentScope()
    kernels = Kernels(make(**{name: scope.symbol(name, sample, high=high) for name, sample in samples.items()}), scope)
    assert scope.guards == ()
    return kernels


def build(*kernels: Kernels) -> None:
    """Machine code of all of them, in one call of the compiler."""
    functions = [function for each in kernels for function in each.functions]
    code = iter(host_backend().build([(f"k{index}", function) for index, function in enumerate(functions)]))
    for each in kernels:
        each.code = [next(code) for _ in each.functions]


def inputs(graph: Graph) -> list[torch.Tensor]:
    """Random tensors for a static graph."""
    torch.manual_seed(0)
    drawn = [torch.randn(value.shape, dtype=torch.float64) for value in graph.params]
    types = [getattr(torch, value.dtype) for value in graph.params]
    return [(x if t.is_floating_point else 10 * x).to(t) for x, t in zip(drawn, types, strict=True)]


def assert_static_bits(make: Callable[..., Graph], sizes: Sequence[Mapping[str, int]], **samples: int) -> Kernels:
    """A graph's kernels for all sizes; asserts that they give the bits of the static kernels of each size."""
    ours = symbolic(make, **samples)
    static = [Kernels(make(**each)) for each in sizes]
    build(ours, *static)
    for theirs, each in zip(static, sizes, strict=True):
        given = inputs(theirs.graph)
        for mine, its in zip(ours(given, **each), theirs(given), strict=True):
            assert torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (mine, its))), each
    return ours
