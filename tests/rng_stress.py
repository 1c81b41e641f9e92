"""Stress of the default generator: threads that draw all the time, dispatched modules that train beside them.

Each draw is a piece of the one stream, so the order in which they happened can be found afterwards: the generator is
run again from the same seed, and every number must belong to some thread's next draw, until all are accounted for
and the states are equal. A number used twice or lost leaves a draw that no thread can have made.

    python -m tests.rng_stress --seconds 60
"""

from __future__ import annotations

import argparse
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bridge import add_tvm_dispatch, stats
from bridge.rng import cpu

DRAWS: dict[str, Callable[[int, torch.Generator | None], Tensor]] = {
    "rand": lambda n, g: torch.rand(n, generator=g),
    "rand float64": lambda n, g: torch.rand(n, dtype=torch.float64, generator=g),
    "bernoulli_": lambda n, g: torch.empty(n).bernoulli_(0.3, generator=g),
    "randn": lambda n, g: torch.randn(n, generator=g),
    "a number kept for later": lambda n, g: torch.randn(5, generator=g),
    "randint": lambda n, g: torch.randint(1000, (n,), generator=g),
}
DROPOUT = "dropout"
KEEP = 0.7


class Drops(nn.Module):
    """Two masks, which are where its outputs are zero."""

    def __init__(self, width: int):
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = F.dropout(self.first(x), 1 - KEEP)
        return hidden, F.dropout(self.second(hidden), 1 - KEEP)


Record = tuple[str, Tensor]
"""A draw's kind, and its numbers or, for a mask, which elements are kept."""


def again(record: Record, generator: torch.Generator) -> bool:
    """Whether these are the generator's next numbers. It draws them."""
    name, drawn = record
    if name != DROPOUT:
        return torch.equal(DRAWS[name](drawn.numel(), generator), drawn)
    return torch.equal(torch.empty(drawn.shape).bernoulli_(KEEP, generator=generator).bool(), drawn)


def account(records: Sequence[Sequence[Record]], before: Tensor, after: Tensor) -> None:
    """Finds an order of all records that is the stream between two states and keeps each thread's order.

    Raises:
        AssertionError: there is none.
    """
    generator, queues = torch.Generator(), [deque(each) for each in records]
    state, passed = before, 0
    while any(queues):
        for position, queue in enumerate(queues):
            generator.set_state(state)
            if queue and again(queue[0], generator):
                queue.popleft()
                queues.insert(0, queues.pop(position))  # a mask is often followed by another one
                break
        else:
            pending = [queue[0][0] for queue in queues if queue]
            raise AssertionError(f"after {passed} draws, nobody drew the next numbers; pending: {pending}")
        state, passed = generator.get_state(), passed + 1
    assert torch.equal(state, after), "numbers at the end that nobody drew"


class Stress:
    """Threads and modules; :meth:`round` lets them all draw for a while and accounts for it."""

    def __init__(self, drawers: int = 8, sizes: Sequence[tuple[int, int]] = ((64, 200), (10, 40))):
        self.drawers, self.counts = drawers, Counter[str]()
        self.samples = [torch.rand(size) for size in sizes]
        self.modules = [
            add_tvm_dispatch(Drops(width).train(), x) for (_, width), x in zip(sizes, self.samples, strict=True)
        ]
        for module, x in zip(self.modules, self.samples, strict=True):
            self.train(module, x)

    def round(self, seed: int, steps: int = 10) -> None:
        """Every module trains so many steps; the drawers draw until the last one has."""
        records: list[list[Record]] = [[] for _ in range(self.drawers + len(self.modules))]
        start = threading.Barrier(len(records) + 1)

        def draw(number: int) -> None:
            choose = random.Random(1000 * seed + number)
            start.wait()
            while any(thread.is_alive() for thread in trainers):
                name = choose.choice([*DRAWS, DROPOUT])
                count = choose.randrange(64, 3000)
                if name == DROPOUT:
                    drawn = F.dropout(torch.ones(count), 1 - KEEP) != 0
                else:
                    drawn = DRAWS[name](count, None)
                records[number].append((name, drawn))

        def train(number: int) -> None:
            module, x = self.modules[number], self.samples[number]
            start.wait()
            for _ in range(steps):
                records[self.drawers + number] += [(DROPOUT, mask) for mask in self.train(module, x)]

        torch.manual_seed(seed)
        before = torch.get_rng_state()
        trainers = [threading.Thread(target=train, args=(number,)) for number in range(len(self.modules))]
        threads = trainers + [threading.Thread(target=draw, args=(number,)) for number in range(self.drawers)]
        for thread in threads:
            thread.start()
        start.wait()
        for thread in threads:
            thread.join()
        account(records, before, torch.get_rng_state())
        self.counts["threads' draws"] += sum(map(len, records[: self.drawers]))
        self.counts["modules' masks"] += sum(map(len, records[self.drawers :]))

    @staticmethod
    def train(module: nn.Module, x: Tensor) -> list[Tensor]:
        """A step; the masks."""
        outputs = module(x)
        sum(output.sum() for output in outputs).backward()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter -= 1e-6 * parameter.grad
                parameter.grad = None
        return [output != 0 for output in outputs]

    def run(self, seconds: float) -> Counter[str]:
        """Rounds, for so long at least; how many draws were accounted for. Large masks' way also for small ones."""
        end, seed = time.monotonic() + seconds, 0
        with mock.patch.multiple(cpu, _JUMP=2, _LEAST=1):
            while time.monotonic() < end or not seed:
                seed += 1
                self.round(seed)
        assert all(stats(module).hits and not stats(module).misses for module in self.modules)
        return self.counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--drawers", type=int, default=8)
    options = parser.parse_args()
    found = Stress(options.drawers).run(options.seconds)
    print(", ".join(f"{count:,} {name}" for name, count in found.items()), "accounted for")


if __name__ == "__main__":
    main()
