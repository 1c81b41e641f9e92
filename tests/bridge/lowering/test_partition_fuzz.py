"""Partition × budget × compiled code: random functions, every strategy, the same bits from the compiled halves."""

from __future__ import annotations

import itertools

import pytest
import torch

import autodiff
from autodiff.ir import Function
from bridge.base.session import SESSION
from bridge.compile import CompileOptions, backend_for, compile_function
from bridge.reference.relax import interpret
from partition import STRATEGIES, MinCut, Partitioned, partition
from tests.device import DEVICE
from tests.partition.random_joints import random_forward
from tests.sampling import sampled

CHOICES = [
    *STRATEGIES,
    *(MinCut(budget=budget, allow_matmul_recompute=True) for budget in (0.6, 0.3, 0)),
    MinCut(budget=0.5),
    MinCut(policy=lambda node: "save" if node.op in ("relax.tanh", "relax.multiply") else None),
]
OUTPUTS, PRIMALS, REQUIRED = 2, 4, 3
#: Relative to the largest intermediate number: half of a gradient may cancel.
ROUNDING = {"float32": 1e-5, "float64": 1e-14}
CASES = [(seed, dtype) for dtype in ROUNDING for seed in range(4)]


@pytest.fixture(autouse=True, scope="module")
def _forget_programs():
    yield
    SESSION.reset("programs")


def random_parts(seed: int, dtype: str) -> tuple[Function, list[Partitioned]]:
    """A random joint function, as the bridge makes it, and its partitions: at least three captured sets differ."""
    for attempt in itertools.count(100 * seed):
        built, outputs, _ = random_forward(attempt, nodes=10 + seed, outputs=OUTPUTS, extents=(5, 12), dtype=dtype)
        joint = autodiff.differentiate(built.build(*outputs), list(range(OUTPUTS)), list(range(REQUIRED)))
        joint = autodiff.clean(joint)
        parts = [partition(joint, num_primals=PRIMALS, num_outputs=OUTPUTS, strategy=choice) for choice in CHOICES]
        if len({tuple(saved.name for saved in part.plan.saved_tensors) for part in parts}) > 2:
            return joint, parts


def arguments(joint: Function, seed: int) -> list[torch.Tensor]:
    """A tensor per parameter: normal numbers, or bools of which two thirds are true."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for param in joint.params:
        numbers = torch.randn([int(extent) for extent in param.ty.shape], generator=generator, dtype=torch.float64)
        kind = getattr(torch, str(param.ty.dtype))
        made.append(numbers > -0.4 if kind is torch.bool else numbers.to(kind))
    return made


def run_compiled(parts: Partitioned, args: list[torch.Tensor]) -> list[torch.Tensor]:
    """Outputs and gradients, from both halves compiled."""
    plan, primals, grad_outs = parts.plan, args[:PRIMALS], args[PRIMALS:]
    options = CompileOptions.current(backend_for(DEVICE))
    found = compile_function(parts.forward, name="forward", options=options)(primals)
    saved = [primals[i] for i in plan.saved_primals] + [found[i] for i in plan.saved_outputs] + found[OUTPUTS:]
    backward = compile_function(parts.backward, name="backward", options=options)
    return [*found[:OUTPUTS], *backward([*saved, *grad_outs])]


@pytest.mark.parametrize("seed,dtype", sampled(CASES, [(0, "float32"), (0, "float64")]))
def test_the_bits_do_not_depend_on_what_is_saved(seed, dtype):
    joint, partitions = random_parts(seed, dtype)
    args = arguments(joint, seed)
    runs = [run_compiled(parts, args) for parts in partitions]

    reference = interpret(joint, args)
    largest = max(float(value.abs().max()) for value in reference.values.values() if value.is_floating_point())
    for ours, wanted in zip(runs[0], reference.results, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=0, atol=ROUNDING[dtype] * largest)
    for choice, run in zip(CHOICES, runs, strict=True):
        for index, (ours, theirs) in enumerate(zip(run, runs[0], strict=True)):
            assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
            assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)), (
                f"result {index} of {choice} differs from {CHOICES[0]}'s by up to {(ours - theirs).abs().max()}"
            )
