"""Arena plans of random lifetimes: values that are alive together never share a byte."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from bridge.compile.loop_ir.graph import Value
from bridge.compile.runtime.layout import ArenaPlan, PoolBlock, Register, RegisterLayout, plan_arena

STEPS = 12
ALIGNMENT = 64


def lifetimes(rng: random.Random) -> dict[Value, tuple[int, int]]:
    """Values of any size and type, some without elements, alive from one step to another."""
    made = {}
    for index in range(rng.randint(0, 40)):
        shape = tuple(rng.choice([0, 1, 2, 3, 7, 16, 33]) for _ in range(rng.randint(0, 3)))
        first = rng.randrange(STEPS)
        dtype = rng.choice(["bool", "float16", "float32", "int64", "float64", "bfloat16"])
        made[Value(f"v{index}", shape, dtype)] = (first, min(STEPS - 1, first + rng.randint(0, 6)))
    return made


def padded(value: Value) -> int:
    return -(-value.nbytes // ALIGNMENT) * ALIGNMENT


def alive(lives: dict[Value, tuple[int, int]], step: int) -> list[Value]:
    return [value for value, (first, last) in lives.items() if first <= step <= last]


@pytest.mark.parametrize("seed", range(30))
def test_slots(seed):
    lives = lifetimes(random.Random(seed))
    plan = plan_arena(lives)
    assert set(plan.offsets) == set(lives)
    assert all(offset >= 0 and offset % ALIGNMENT == 0 for offset in plan.offsets.values())
    assert all(plan.offsets[value] + value.nbytes <= plan.size for value in lives)
    for step in range(STEPS):
        taken = sorted((plan.offsets[v], plan.offsets[v] + v.nbytes) for v in alive(lives, step) if v.nbytes)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(taken)), (step, taken)
    needed = max(sum(map(padded, alive(lives, step))) for step in range(STEPS))
    assert needed <= plan.size <= sum(map(padded, lives))


@pytest.mark.parametrize("seed", range(10))
def test_tensors_hold_what_was_written_for_as_long_as_they_live(seed):
    rng = random.Random(100 + seed)
    lives = lifetimes(rng)
    plan = plan_arena(lives)
    placed = tuple(Register(i, v.name, v.shape, v.dtype, plan.offsets[v]) for i, v in enumerate(lives))
    registers = [None] * len(lives)
    RegisterLayout(len(lives), (), placed, plan.size, (), (), (), ()).fill(registers, PoolBlock(plan.size).memory)
    tensors = dict(zip(lives, registers, strict=True))
    number = {
        value: torch.tensor(rng.randint(0, 1) if value.dtype == "bool" else index) for index, value in enumerate(lives)
    }
    for step in range(STEPS):
        for value in alive(lives, step):
            tensor = tensors[value]
            assert tuple(tensor.shape) == value.shape and str(tensor.dtype) == f"torch.{value.dtype}"
            assert tensor.is_contiguous() and (not tensor.numel() or tensor.data_ptr() % ALIGNMENT == 0)
            if step == lives[value][0]:
                tensor.fill_(number[value].to(tensor.dtype))
        for value in alive(lives, step):
            assert (tensors[value] == number[value].to(tensors[value].dtype)).all(), (step, value)


def test_an_arena_of_nothing():
    assert plan_arena({}) == ArenaPlan({}, 0)
