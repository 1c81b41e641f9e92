"""Large intermediates in memory of torch's allocator: the same bits, a smaller arena, memory only while it is used."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from bridge import add_tvm_dispatch, stats
from bridge.base.session import SESSION
from bridge.compile import Program, RunLoop
from bridge.compile.cpu.backend import CpuBackend
from bridge.compile.runtime.allocations import with_allocations
from bridge.compile.runtime.executor import Executor
from bridge.compile.runtime.instructions import Allocate
from tests.bridge.compile.test_pool import inputs, softmax_of_products


def is_loop(step) -> bool:
    return isinstance(step, RunLoop)


def run(program: Program, given: list[torch.Tensor]) -> list[torch.Tensor]:
    return Executor(program, program.backend.device, prepare=torch.get_num_threads)(given)


def allocated(program: Program) -> list[str]:
    return [step.outputs[0] for step in program.steps if isinstance(step, Allocate)]


@pytest.mark.parametrize("least", [1, 64 * 32 * 4, 64 * 32 * 4 + 1])
def test_only_large_intermediates_leave_the_arena(least):
    program, given = softmax_of_products(64), inputs(64)
    changed = with_allocations(program, least)
    large = [each.name for each in program.layout.arena if each.nbytes >= least]
    assert sorted(allocated(changed)) == sorted(large)
    assert (changed is program) == (not large)
    assert (changed.arena_bytes < program.arena_bytes) == bool(large)
    for mine, other in zip(run(changed, given), run(program, given), strict=True):
        assert torch.equal(mine, other)


def test_memory_is_freed_after_its_last_use():
    program = with_allocations(softmax_of_products(64), 1)
    executor = Executor(program, program.backend.device, prepare=torch.get_num_threads)
    alive: list[weakref.ref] = []
    most = 0

    def watched(action, step):
        def act(registers):
            nonlocal most
            action(registers)
            if isinstance(step, Allocate):
                alive.append(weakref.ref(registers[step.writes[0]]))
            most = max(most, sum(each() is not None for each in alive))

        return act

    executor.actions = [
        (watched(action, step), last) for (action, last), step in zip(executor.actions, executor.steps, strict=True)
    ]
    executor(inputs(64))
    assert len(alive) >= 3 and most < len(alive)
    assert all(each() is None for each in alive)


class Recurrent(nn.Module):
    """A loop, a convolution, a concatenation, a softmax."""

    def __init__(self):
        super().__init__()
        self.conv, self.cell, self.out = nn.Conv1d(6, 8, 3, padding=1), nn.Linear(8 + 5, 5), nn.Linear(10, 4)

    def forward(self, x):
        x = self.conv(x.transpose(1, 2)).relu().transpose(1, 2)
        h, states = x.new_zeros(len(x), 5), []
        for step in x.unbind(1):
            h = torch.tanh(self.cell(torch.cat([step, h], -1)))
            states.append(h)
        y = torch.stack(states, 1)
        scores = (y @ y.mT).softmax(-1) @ y
        return self.out(torch.cat([y, scores], -1)).log_softmax(-1)


@pytest.mark.parametrize("dynamic", [False, True])
def test_training_has_the_same_bits(dynamic, monkeypatch):
    def trained() -> list[torch.Tensor]:
        SESSION.reset("programs")
        torch.manual_seed(0)
        module = Recurrent()
        shapes = {"dynamic_shapes": {"x": {0: torch.export.Dim("rows", min=2, max=64)}}} if dynamic else {}
        add_tvm_dispatch(module, torch.randn(4, 9, 6, requires_grad=True), **shapes)
        for rows in (4, 7, 4) if dynamic else (4, 4):
            x = torch.randn(rows, 9, 6, requires_grad=True)
            module(x).square().sum().backward()
        assert not stats(module).misses
        return [x.grad, *(parameter.grad for parameter in module.parameters())]

    wanted = trained()
    made = []
    executor = CpuBackend.executor

    def allocating(backend, program):
        made.append(with_allocations(program, 1))
        return executor(backend, made[-1])

    monkeypatch.setattr(CpuBackend, "executor", allocating)
    for mine, other in zip(trained(), wanted, strict=True):
        assert torch.equal(mine, other)
    assert any(map(allocated, made))
    assert not any(program.arena_bytes for program in made if not any(map(is_loop, program.steps)))
    SESSION.reset("programs")
