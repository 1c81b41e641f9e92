"""A long run of training, dispatched and eager side by side: everything that a training loop does, in any order.

Lengths that vary, accumulation, evaluation, activation checkpoints, checkpoints of the run (saved, spoilt and loaded),
parameters that move to other memory. Both run from the same state of the generator; their losses are kept.
"""

from __future__ import annotations

import copy
import gc
import io
import random
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bridge import add_tvm_dispatch, stats
from bridge.base.generators import default_generator
from tests.device import DEVICE

_WIDTH, _CLASSES, _BATCH = 24, 7, 3
LENGTHS = (5, 8, 11)
_LEAST_BYTES = 512
"""That the allocator of a GPU takes for a tensor."""


class _Layer(nn.Module):
    """Products, a norm, dropout, a buffer that is written."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, 64), nn.Linear(64, _CLASSES)
        self.register_buffer("mean", torch.zeros(_WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean((0, 1)))
        return self.down(F.dropout(F.gelu(self.up(self.norm(x) - self.mean)), 0.2, self.training))


class _Run:
    """One module with its optimizer.

    Attributes:
        losses: of all steps; ``backwards``: how many there were.
    """

    def __init__(self, module: nn.Module):
        self.module, self.losses, self.backwards = module, [], 0
        self.optimizer = torch.optim.AdamW(module.parameters(), 1e-3, foreach=True)

    def loss(self, seed: int, length: int, call: Callable | None = None) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        shape = _BATCH, length
        x = torch.randn(*shape, _WIDTH, generator=generator, dtype=torch.float64, device="cpu").to(DEVICE)
        y = torch.randint(_CLASSES, shape, generator=generator, device="cpu").to(DEVICE)
        return F.cross_entropy((call or self.module)(x).flatten(0, 1), y.flatten())

    def train(self, seed: int, lengths: list[int], call: Callable | None = None) -> None:
        """A step of the optimizer, over one batch or several."""
        for place, length in enumerate(lengths):
            loss = self.loss(seed + place, length, call)
            loss.backward()
            self.backwards += 1
            self.losses.append(loss.detach())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def checkpointed(self, seed: int, lengths: list[int]) -> None:
        self.train(seed, lengths[:1], lambda x: checkpoint(self.module, x, use_reentrant=False))

    def evaluate(self, seed: int, lengths: list[int]) -> None:
        self.module.eval()
        with torch.no_grad():
            self.losses += [self.loss(seed, length) for length in lengths]
        self.module.train()

    def save_and_load(self, seed: int, lengths: list[int]) -> None:
        """Saves, trains on, and loads again; every second time the parameters take the loaded memory."""
        saved = io.BytesIO()
        torch.save((self.module.state_dict(), self.optimizer.state_dict()), saved)
        self.train(seed, lengths)
        saved.seek(0)
        state, of_optimizer = torch.load(saved, map_location=DEVICE)
        self.module.load_state_dict(state, assign=seed % 2 == 0)
        if seed % 2 == 0:
            self.optimizer = torch.optim.AdamW(self.module.parameters(), 1e-3, foreach=True)
        self.optimizer.load_state_dict(of_optimizer)

    def move(self, seed: int, lengths: list[int]) -> None:
        """Moves the parameters to other memory."""
        for parameter in self.module.parameters():
            parameter.data = parameter.data.clone()


class LongRun:
    """Both runs, ``ours`` and ``eager``. ``steps(count)`` goes on."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        eager = _Layer().to(DEVICE, torch.float64)
        module, x = copy.deepcopy(eager), torch.randn(_BATCH, 6, _WIDTH, dtype=torch.float64, device=DEVICE)
        for is_training in (True, False):
            with torch.set_grad_enabled(is_training):
                shapes = ({1: torch.export.Dim("length", min=2)},)
                add_tvm_dispatch(module.train(is_training), x, dynamic_shapes=shapes, cuda_graphs=True)
        self.ours, self.eager = _Run(module.train()), _Run(eager)
        self._order, self._seed = random.Random(0), 0

    @property
    def graphs(self):
        return stats(self.ours.module).graphs

    @property
    def program_runs(self) -> int:
        """Counts of compiled calls: forward programs, and backward programs."""
        return stats(self.ours.module).hits + self.ours.backwards

    def steps(self, count: int) -> None:
        for _ in range(count):
            self._seed += 10
            rare = self._seed % 400 == 0
            kind = self._order.choice(("save_and_load", "move") if rare else ("train", "checkpointed", "evaluate"))
            lengths = [self._order.choice(LENGTHS) for _ in range(self._order.choice((1, 1, 2, 3)))]
            states = []
            for run in (self.ours, self.eager):
                torch.manual_seed(self._seed)
                getattr(run, kind)(self._seed, lengths)
                states.append(default_generator(DEVICE).get_state())
            assert torch.equal(*states), (kind, lengths)

    def check(self) -> None:
        """Losses, parameters and buffers are eager's."""
        torch.testing.assert_close(torch.stack(self.ours.losses), torch.stack(self.eager.losses), rtol=1e-9, atol=1e-9)
        for ours, theirs in zip(*(run.module.state_dict().values() for run in (self.ours, self.eager)), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-9)

    def held_bytes(self) -> int:
        """Bytes on the device, by the allocator; on the host, by the graphs' count."""
        gc.collect()
        if DEVICE.type != "cuda":
            return self.graphs.held_bytes
        torch.cuda.synchronize()
        losses = len(self.ours.losses) + len(self.eager.losses)
        return torch.cuda.memory_allocated() - losses * _LEAST_BYTES
