"""Slices of tensors with the steps in front: aligned to 16 bytes where a kernel reads vectors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bridge.compile import Launch
from bridge.compile.runtime import executor, loop
from tests.bridge.compare import check_module
from tests.sampling import sampled


class Cell(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.cell = nn.GRUCell(width, width)

    def forward(self, x):
        state, states = torch.zeros_like(x[0]), []
        for part in x:
            state = self.cell(part, state)
            states.append(state)
        return torch.stack(states)


@pytest.mark.parametrize("width", sampled([5, 8], [5]))
def test_kernels_of_a_gpu_read_and_write_at_multiples_of_a_vector(width, monkeypatch):
    monkeypatch.setattr(loop, "HOST", torch.device("meta"))  # the host is a GPU to loops
    launched, found = executor._launch, []

    def watched(launch: Launch, *rest):
        run = launched(launch, *rest)
        slots = (*launch.reads, *launch.writes)

        def look(registers):
            found.extend(registers[slot].data_ptr() % 16 for slot in slots)
            run(registers)

        return look

    monkeypatch.setattr(executor, "_launch", watched)
    check_module(
        lambda: Cell(width), lambda: torch.randn(7, 3, width, requires_grad=True), dtype=torch.float32, calls=1
    )
    assert found and not any(found)
