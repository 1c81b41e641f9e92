"""Iteration spaces against brute force: every element once, every operand at its address."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from bridge.compile.cpu.backend import ORDER, host_backend
from bridge.compile.loop_ir import views
from bridge.compile.loop_ir.views import View
from bridge.compile.schedule.access import Space, make_space, share_loops
from tests.bridge.compile.random_views import addresses, factors

SIZES = [1, 2, 7, 12, 24, 64, 96, 360, 1024, 5000, 12288]


def coordinates(space: Space) -> list[tuple[np.ndarray, np.ndarray]]:
    """Row and column coordinates, one column of each array per loop, of all elements in the order of the walk."""
    rows = np.array(list(itertools.product(*map(range, space.rows)))).reshape(-1, len(space.rows)).astype(int)
    columns = np.array(list(itertools.product(*map(range, space.columns))))
    walks = [(np.repeat(rows, len(columns), axis=0), np.tile(columns, (len(rows), 1)))]
    if space.remainder:
        assert len(space.rows) == len(space.columns) == 1
        rest = np.arange(space.remainder)[:, None]
        walks.append((np.full_like(rest, space.row_count), rest))
    return walks


def walked(space: Space, view: View, scale: int = 1) -> np.ndarray:
    """Addresses of a view's elements in the order of the walk."""
    row_strides, column_strides = space.strides(view, scale)
    parts = [view.offset + rows @ row_strides + columns @ column_strides for rows, columns in coordinates(space)]
    return np.concatenate(parts)


def random_access(rng: random.Random, elements: int) -> View:
    """A view of so many elements: permuted, broadcast, sliced."""
    shape = factors(rng, elements)
    kinds = [rng.choice(["dense", "dense", "broadcast"]) for _ in shape]
    base = views.dense(
        [1 if kind == "broadcast" else extent + rng.randint(0, 1) for kind, extent in zip(kinds, shape, strict=True)]
    )
    order = rng.sample(range(len(shape)), len(shape)) if rng.random() < 0.5 else list(range(len(shape)))
    for axis, (kind, extent) in enumerate(zip(kinds, shape, strict=True)):
        if kind == "dense":
            begin = rng.randint(0, base.shape[axis] - extent)
            base = views.slice_view(base, axis, begin, begin + extent, 1)
    return views.permute(views.expand(base, shape), order)


@pytest.mark.parametrize("seed", range(12))
def test_every_element_once_at_its_address(seed):
    rng = random.Random(seed)
    found = 0
    for _ in range(25):
        elements = rng.choice(SIZES)
        columns = rng.choice([None, None, *(n for n in range(1, elements + 1) if elements % n == 0)])
        accesses = [(random_access(rng, elements), 1) for _ in range(rng.randint(0, 3))]
        if columns is not None and rng.random() < 0.5:
            accesses.append((random_access(rng, elements // columns), columns))
        reduces = columns is not None and rng.random() < 0.5
        space = make_space(elements, columns, accesses, host_backend(), reduces=reduces)
        if space is None:
            continue
        found += 1
        assert np.array_equal(walked(space, views.dense((elements,))), np.arange(elements)), space
        assert columns in (None, space.column_count) and not (columns and space.remainder)
        for view, scale in accesses:
            assert np.array_equal(walked(space, view, scale), np.repeat(addresses(view), scale)), (space, view, scale)
        if reduces and len(space.columns) > 1:  # a vector never crosses from one column loop to the next
            assert space.columns[-1] % (ORDER.lanes * ORDER.accumulators(columns)) == 0
    assert found > 5


@pytest.mark.parametrize("seed", range(4))
def test_one_view_always_has_loops(seed):
    rng = random.Random(seed)
    for _ in range(100):
        elements = rng.choice(SIZES)
        assert share_loops([random_access(rng, elements)], elements, host_backend())


@pytest.mark.parametrize("seed", range(6))
def test_the_stages_of_a_reduction_are_the_reduction(seed):
    rng = random.Random(seed)
    for _ in range(40):
        shape = factors(rng, rng.choice([6, 24, 96, 360, 32768, 49152]))
        axes = {axis for axis in range(len(shape)) if rng.random() < 0.5}
        x = np.array([rng.randint(-9, 9) for _ in range(97)])[np.arange(math.prod(shape)) % 97]
        made = x
        for outer, reduced, inner in ORDER.stages(shape, axes):
            made = made.reshape(outer, reduced, inner).sum(1)
        assert np.array_equal(made.ravel(), x.reshape(shape).sum(tuple(axes)).ravel() if axes else x), (shape, axes)
