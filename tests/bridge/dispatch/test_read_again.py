"""What becomes of a call's inputs between forward and backward: gradients are of the numbers that eager has kept."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.bridge.beside import beside, double


class Net(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.first, self.second, self.run = nn.Linear(4, 4).double(), nn.Linear(4, 4).double(), forward
        self.register_buffer("queue", double(5, 4, 3))
        self.register_buffer("count", torch.tensor(1))
        self.scale = double(6, 4)

    def forward(self, x, *others):
        return self.run(self, x, *others)


def numpys(m, x):
    x.numpy()[...] = 7.0


def behind_data(m, x):
    x.data.copy_(x.flip(0))


def in_place(m, x):
    x.copy_(x.flip(0) * 3)


def enqueue(m, x):
    m.queue.copy_(m.queue.roll(1, 1) * 2)


def counts(m, x):
    m.count += 1


def scales(m, x):
    m.scale.mul_(3)


def new_data(m, x):
    m.second.weight.data = m.second.weight.data * -2


def as_before(m, x):
    return None


def scaled(m, x):
    return m.first(x / 3)


def direct(m, x):
    return m.second(torch.tanh(m.first(x)))


def queued(m, x):
    return m.first(x) @ m.queue.clone().detach()


def counted(m, x):
    return m.first(x / 2) * torch.exp(-(torch.arange(4) - m.count).abs().double() * m.second.bias.abs())


def of_attribute(m, x):
    return m.first(x / 2) * (m.scale * 2).exp()


def of_itself(m, x):
    return (m.second.weight * m.first(x)[:, None]).sum(1) + m.first(x)


CASES = [
    (scaled, numpys),
    (scaled, behind_data),
    (scaled, in_place),
    (direct, numpys),
    (direct, behind_data),
    (direct, new_data),
    (of_itself, new_data),
    (queued, enqueue),
    (counted, counts),
    (counted, in_place),
    (of_attribute, scales),
    (of_attribute, as_before),
]


def names(case):
    return "-".join(each.__name__ for each in case)


@pytest.mark.parametrize("case", CASES, ids=names)
def test_gradients_are_of_what_eager_has_kept(case):
    forward, change = case

    def step(m, _, i):
        x = double(10 + i, 3, 4)
        y = m(x)
        change(m, x)
        y.square().sum().backward()
        return y

    beside(lambda: (Net(forward), None), step, lambda m, own: (double(9, 3, 4),))


BATCHES = {
    "uint8": (lambda m, x: m.second(torch.relu(m.first(x.double() / 255))), lambda: torch.randint(256, (3, 4)).byte()),
    "labels": (lambda m, x: m.first(F.one_hot(x, 4).double()).square(), lambda: torch.randint(4, (3,))),
    "mask": (lambda m, x: m.first(x.double() * 2 - 1) * x.double(), lambda: torch.rand(3, 4) > 0.5),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_integers_and_masks_move_on(kind):
    forward, batch = BATCHES[kind]

    def step(m, own, i):
        own.batch = batch() if own.batch is None else own.batch
        y = m(own.batch)
        own.batch.copy_(own.batch.flip(0))
        y.sum().backward()
        return y

    beside(lambda: (Net(forward), SimpleNamespace(batch=None)), step, lambda m, own: (batch(),))


def test_what_eager_needs_itself_is_an_error_there_too():
    def step(m, _, i):
        x = double(10 + i, 3, 4)
        y = m(x)
        x.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
        m.zero_grad()  # of eager some are there by then
        return y

    beside(lambda: (Net(direct), None), step, lambda m, own: (double(9, 3, 4),))
