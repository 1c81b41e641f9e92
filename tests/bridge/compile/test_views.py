"""Strided views against torch: random chains of shape operations, element by element."""

from __future__ import annotations

import math
import random

import pytest
import torch

from bridge.compile.loop_ir import views
from bridge.compile.loop_ir.views import View
from tests.bridge.compile.random_views import SHAPES, random_step, random_view

SEEDS = range(8)
CASES = 60  # chains for each seed


def shown(view: View, base: torch.Tensor) -> torch.Tensor:
    return base.as_strided(view.shape, view.strides, view.offset) if view.numel else torch.empty(view.shape).long()


def enumerated(view: View) -> list[int]:
    """Addresses in the order of the view's merged dimensions."""
    addresses = [view.offset] if view.numel else []
    for extent, stride in views.merged(view):
        addresses = [address + i * stride for address in addresses for i in range(extent)]
    return addresses


@pytest.mark.parametrize("seed", SEEDS)
def test_a_chain_of_shape_operations_is_one_strided_view(seed):
    rng = random.Random(seed)
    for _ in range(CASES):
        shape = rng.choice(SHAPES)
        base = torch.arange(math.prod(shape))
        view, tensor = random_view(rng, rng.randint(1, 8), shape)
        assert view.shape == tuple(tensor.shape)
        assert torch.equal(shown(view, base), tensor), view
        assert enumerated(view) == tensor.flatten().tolist(), view
        if tensor.numel():
            assert views.is_dense(view) == tensor.is_contiguous(), view


@pytest.mark.parametrize("seed", SEEDS)
def test_a_box_is_where_it_is_said_to_be(seed):
    rng = random.Random(seed)
    found = 0
    for _ in range(CASES):
        shape = rng.choice(SHAPES)
        base = torch.arange(math.prod(shape)).view(shape)
        view, tensor = random_view(rng, rng.randint(0, 3), shape)
        corner = views.box(view, shape)
        wanted = tensor.numel() and _is_box(tensor, base)
        assert (corner is not None) == bool(wanted), (view, shape)
        if corner is not None:
            found += 1
            cut = views.cut_out(views.dense(shape), corner, view.shape)
            assert torch.equal(shown(cut, base.flatten()), tensor), (view, corner)
    assert found > CASES // 10


def _is_box(tensor: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether a tensor of addresses is a box of the base, by search."""
    if tensor.dim() != base.dim() or any(have > extent for have, extent in zip(tensor.shape, base.shape, strict=True)):
        return False
    corners = torch.cartesian_prod(*map(torch.arange, base.shape)).view(-1, base.dim()) if base.dim() else [[]]
    for corner in corners:
        index = tuple(slice(int(b), int(b) + n) for b, n in zip(corner, tensor.shape, strict=True))
        if base[index].shape == tensor.shape and torch.equal(base[index], tensor):
            return True
    return False


@pytest.mark.parametrize("seed", SEEDS)
def test_a_view_of_a_view_is_one_view_or_none(seed):
    """Where it is one: the same elements. A permutation of the other view's own dimensions always is."""
    rng = random.Random(seed)
    composed = 0
    for _ in range(CASES):
        inner, tensor = random_view(rng, rng.randint(0, 4), rng.choice([s for s in SHAPES if math.prod(s)]))
        if not tensor.numel():
            continue
        outer, order = views.dense(inner.shape), torch.arange(tensor.numel()).view(inner.shape)
        plain = rng.random() < 0.5
        if plain:
            axes = rng.sample(range(order.dim()), order.dim())
            outer, order = views.permute(outer, axes), order.permute(axes)
        else:
            for _ in range(rng.randint(1, 4)):
                outer, order = random_step(rng, outer, order)
        made = views.compose(outer, inner)
        if plain:
            assert made is not None, (outer, inner)
        if made is not None:
            composed += 1
            base = torch.arange(int(tensor.max()) + 1)
            assert torch.equal(shown(made, base), tensor.flatten()[order]), (outer, inner)
    assert composed > CASES // 4


@pytest.mark.parametrize(
    ("view", "shape"), [(views.dense((3, 1)), (2, 3)), (views.dense((2, 3)), (3,)), (views.dense((2,)), (4,))], ids=str
)
def test_shapes_that_do_not_broadcast(view, shape):
    with pytest.raises(ValueError, match="cannot broadcast"):
        views.expand(view, shape)
