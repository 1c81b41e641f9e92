"""Random functions with one or two symbolic extents: one program, bound to sizes, as the programs of those sizes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from autodiff.extents import ExtentScope
from bridge.compile import compile_function
from tests.autodiff.instantiate import instantiate
from tests.bridge.compile.random_functions import OnRelax, draw, play
from tests.bridge.compile_helpers import current_options, function
from tests.sampling import sampled


@pytest.mark.parametrize("seed", sampled([0, 3, 7, 12, 16], [0, 7]))
def test_one_program_for_all_sizes(seed):
    inputs, program = draw(seed, 20)
    assert all(step[0] != "slice" for step in program)  # its end is a number
    rng = random.Random(seed)
    names = {extent: f"n{extent}" for extent in rng.sample(inputs[0], rng.choice([1, 2])) if extent != 1}
    scope = ExtentScope()
    symbols = {extent: scope.symbol(name, extent) for extent, name in names.items()}
    shapes = [tuple(symbols.get(extent, extent) for extent in shape) for shape in inputs]
    steps = [
        (*step[:2], tuple(symbols.get(e, e) for e in step[2])) if step[0] == "unflatten" else step for step in program
    ]
    count = len(inputs) + len(program)
    wanted = sorted({count - 1, *rng.sample(range(len(inputs), count), 4)})
    made = function(
        [(shape, "float32") for shape in shapes],
        lambda emit, *params: [play(OnRelax(emit), list(params), steps)[i] for i in wanted],
    )
    options = replace(current_options(), deterministic=True)
    ours = compile_function(made, name="symbolic", options=options)
    assert all(guard.relation == ">=" and "2147483647" in str(guard) for guard in scope.guards)
    for _ in range(2):
        sizes = {name: rng.choice([2, 3, 16, 17, 33, 64, 100]) for name in names.values()}
        generator = torch.Generator().manual_seed(seed)
        given = [torch.randn(scope.compiled(shape)(sizes), generator=generator) for shape in shapes]
        theirs = compile_function(instantiate(made, sizes), name="static", options=options)
        for mine, its in zip(ours.bind(sizes)(list(given)), theirs(list(given)), strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-5, equal_nan=True)
