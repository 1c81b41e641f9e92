"""Groups of random graphs: legal in order and in their reads, and bitwise equal to unfused nodes."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from bridge.compile import host_backend
from bridge.compile.loop_ir.graph import Graph, Operand, Reduction
from bridge.compile.passes.choose_layouts import choose_layouts
from bridge.compile.pipeline import optimize
from bridge.compile.runtime.link import assemble
from bridge.compile.schedule.fuse import Group, fuse, space_of
from bridge.compile.translate import translate
from tests.bridge.compile.random_functions import build, draw, sample
from tests.bridge.compile.random_views import addresses
from tests.sampling import sampled


def random_graph(seed: int, length: int, dtype: str = "float32") -> tuple[Graph, list[torch.Tensor]]:
    inputs, program = draw(seed, length)
    count = len(inputs) + len(program)
    wanted = sorted({count - 1, *random.Random(seed).sample(range(len(inputs), count), 3)})
    function = build(inputs, program, dtype, wanted)
    tensors = [tensor.to(getattr(torch, dtype)) for tensor in sample(inputs, torch.float32, seed)]
    backend = host_backend()
    graph = choose_layouts(translate(function, backend), backend, backend.products(1, False))
    return optimize(graph, backend), tensors


def assert_legal(graph: Graph, groups: list[Group]) -> None:
    """Each node in one group; every group and every node reads only values that are computed before it."""
    nodes = [node for group in groups for node in group.nodes]
    assert len(nodes) == len(set(nodes)) and set(nodes) == set(graph.nodes)
    available = {*graph.params, *graph.constants}
    for group in groups:
        inside = {out for node in group.nodes for out in node.outs}
        done = set()
        for node in group.nodes:
            for operand in node.operands:
                if isinstance(operand, Operand):
                    assert operand.value in (done if operand.value in inside else available), (node, operand)
            done.update(node.outs)
        assert set(group.made) == inside
        if len(group.nodes) > 1:
            assert space_of(group, host_backend()) is not None
            assert_at_its_own_place(group)
        available |= inside
    assert {operand.value for operand in graph.results} <= available


def assert_at_its_own_place(group: Group) -> None:
    """A member reads another member's value at the same element of the iteration space, or once for its row."""
    elements = np.arange(group.elements)
    rows = elements // group.columns if group.columns else None
    for node in group.nodes:
        read_at = elements
        if node in group.per_row:
            read_at = np.arange(group.elements // group.columns)
            assert node.out.numel == len(read_at)
        for operand in node.operands:
            producer = group.made.get(operand.value) if isinstance(operand, Operand) else None
            if producer is None:
                continue
            assert not (isinstance(producer, Reduction) and producer.inner != 1), "complete only after the last row"
            per_row = producer in group.per_row or isinstance(producer, Reduction)
            assert per_row or node not in group.per_row
            made_at = rows if per_row and node not in group.per_row else read_at
            assert np.array_equal(addresses(operand.view), made_at), (node, operand)


@pytest.mark.parametrize("seed", sampled(range(60), range(20)))
def test_groups_are_legal(seed):
    graph, _ = random_graph(seed, 32)
    groups = fuse(graph, host_backend())
    assert_legal(graph, groups)
    assert len(groups) < len(graph.nodes), "something fuses"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("seed", sampled(range(8), range(2)))
def test_fusion_changes_no_bit(seed, dtype):
    graph, tensors = random_graph(200 + seed, 18, dtype)
    fused = assemble(graph, "fused", host_backend(), {})
    unfused = replace(host_backend(), limits=host_backend().limits.having(nodes=1))
    single = fuse(graph, unfused)
    assert_legal(graph, single)
    assert all(len(group.nodes) == 1 for group in single)
    alone = assemble(graph, "alone", unfused, {})
    assert len(fused.steps) <= len(alone.steps)
    for ours, theirs in zip(fused(tensors), alone(tensors), strict=True):
        assert torch.equal(ours.nan_to_num(), theirs.nan_to_num()) and torch.equal(ours.isnan(), theirs.isnan())
