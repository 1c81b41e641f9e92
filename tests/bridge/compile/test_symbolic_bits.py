"""Random functions over a symbolic number of rows: five sizes each, against the program compiled for the size."""

from __future__ import annotations

import random

import pytest
import torch

from autodiff.ir import shape
from tests.bridge.compile.random_functions import BINARY, UNARY, OnRelax, broadcastable
from tests.bridge.compile.symbolic import Symbolic
from tests.sampling import sampled

LENGTH = 14
STATIC = [(5, 24), (12, 16), (3, 64), (1, 33), (40, 8)]
SIZES = (2, 3, 13, 48, 301)


def body(seed: int, a: int, b: int, anywhere: bool):
    """A function of values ``[n, a, b]``, ``[a, b]`` and ``[n, 1, b]``; ``n`` is innermost only if ``anywhere``."""

    def play(emit, x, y, z, n):
        rng, on = random.Random(seed), OnRelax(emit)
        values = [x, on.unflatten(y, (1, a, b)), z]
        while len(values) < LENGTH:
            value = rng.choice(values[-5:])
            extents = shape(value)
            rank, kind = len(extents), rng.random()
            static = [axis for axis, extent in enumerate(extents) if isinstance(extent, int)]
            if kind < 0.25:
                made = on.unary(rng.choice(UNARY), value)
            elif kind < 0.55:
                partners = [each for each in values if len(shape(each)) == rank and fit(shape(each), extents)]
                made = on.binary(rng.choice(BINARY), value, rng.choice(partners))
            elif kind < 0.75:
                axes = rng.sample(range(rank), rng.randint(1, rank)) if anywhere else rng.choice([[0], [rank - 1]])
                made = on.reduce(rng.choice(["sum", "max"]), value, axes)
            elif kind < 0.8:
                made = on.softmax(value)
            elif kind < 0.9:
                order = [1, 0, 2] if rank == 3 else [0, 1]
                made = on.permute(value, rng.sample(range(rank), rank) if anywhere else order)
            elif kind < 0.95 and static:
                axis = rng.choice(static)
                made = on.slice(value, axis, rng.randint(1, extents[axis]))
            else:
                made = on.unflatten(value, (extents[0] * extents[1], extents[2]) if rank == 3 else (1, *extents))
            values.append(made)
        return [value for value in values[3:] if rng.random() < 0.4 or value is values[-1]]

    return play


def fit(one, other) -> bool:
    """Whether shapes broadcast, without a guard on an extent."""
    return broadcastable(*(tuple(1 if str(extent) == "1" else str(extent) for extent in each) for each in (one, other)))


def made(seed: int, anywhere: bool, dtype: str) -> Symbolic:
    rng = random.Random(seed)
    (a, b), sample = rng.choice(STATIC), rng.choice([2, 7, 48])
    params = [("n", a, b), (a, b), ("n", 1, b)]
    return Symbolic(params, body(seed, a, b, anywhere), dtype, samples=[("n", sample)])


@pytest.mark.parametrize("seed", sampled(range(5), range(3)))
def test_rows(seed):
    symbolic = made(seed, False, "float32")
    for n in SIZES:
        symbolic.assert_same_bits(n=n)
    assert len(symbolic.guards) <= 1, symbolic.guards


@pytest.mark.parametrize("seed", sampled(range(3), range(2)))
def test_anywhere(seed):
    """Sums may be cut in two stages at other places than for a known size."""
    symbolic = made(seed, True, "float64")
    for n in SIZES:
        for our, their in zip(*symbolic.both(n=n), strict=True):
            scale = their.abs().max().item()
            torch.testing.assert_close(our, their, rtol=0, atol=1e-12 * max(scale, 1))
    assert len(symbolic.guards) <= 1, symbolic.guards
