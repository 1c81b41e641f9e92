"""A layer with every kind of instruction, and its programs as another process makes, loads and runs them.

    python -m tests.bridge.compile.stored_program FOLDER

prints JSON: for each direction the texts' digest of a program made anew and the bits of the one in the folder.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import nn

from bridge import add_tvm_dispatch, stats
from bridge.artifact import to_text
from bridge.compile import Program, backend_for
from bridge.compile.cpu.products import CpuProducts
from bridge.compile.runtime.storage import load, texts
from bridge.compile.schedule.products import GENERATED

DIRECTIONS = ("forward", "backward")


class Layer(nn.Module):
    """An embedding, attention with dropout and a table of numbers, LayerNorm, a scan, a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = self.embed(ids)
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        scores = q @ k.mT * torch.tensor([0.5, 2.0]).view(2, 1, 1)
        heads = torch.dropout(scores.softmax(-1), 0.1, True) @ v
        y = self.norm(x + self.out(heads.transpose(1, 2).flatten(2)))
        state = y[:, 0]
        for _ in range(4):
            state = torch.tanh(state @ self.out.weight) * self.norm.weight
        return y, y.cumsum(1), state


@cache
def programs() -> dict[str, Program]:
    """Compiled in this process; ways of products are not measured, because a measurement may differ elsewhere."""
    chosen = CpuProducts.choose
    CpuProducts.choose = lambda policy, product: GENERATED if product.batch == 1 else "bmm"
    try:
        entry = stats(add_tvm_dispatch(Layer(), torch.zeros(3, 5, dtype=torch.int64))).entries[0]
    finally:
        CpuProducts.choose = chosen
    return {direction: getattr(entry, direction) for direction in DIRECTIONS}


def inputs(program: Program) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(2, param.shape, generator=generator).to(param.torch_dtype)
        if not param.torch_dtype.is_floating_point
        else torch.randn(param.shape, generator=generator).to(param.torch_dtype)
        for param in program.layout.params
    ]


def bits(run: Callable, program: Program) -> str:
    """Digest of the results of ``run`` on inputs of the program."""
    made = [result.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for result in run(inputs(program))]
    return hashlib.sha256(b"".join(made)).hexdigest()


def digest(program: Program) -> dict[str, str]:
    return {name: hashlib.sha256(to_text(told).encode()).hexdigest() for name, told in texts(program).items()}


if __name__ == "__main__":
    made, found = programs(), {}
    for direction in DIRECTIONS:
        loaded = load(Path(sys.argv[1]) / direction, backend_for(None))
        found[direction] = [digest(made[direction]), bits(loaded, loaded)]
    json.dump(found, sys.stdout)
