"""A call's inputs change between forward and backward: gradients are of the numbers that eager has kept."""

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


def others_view(tensor):
    """The tensor's memory as another library writes it, which torch counts no writes of."""
    return tensor.numpy() if tensor.device.type == "cpu" else torch.from_dlpack(tensor)


def numpys(m, x):
    others_view(x)[...] = 7.0


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


MIXED = {
    "exp": lambda m, t: m.first(t) + (t * 2).exp() * m.first.bias,
    "scaled": lambda m, t: m.first(t) + m.first(t * 3),
    "product": lambda m, t: m.first(t) @ (t * m.first.weight),
    "views": lambda m, t: m.first(t.t()) @ (t * m.first.bias) + m.first(t.sin()),
    "softmax": lambda m, t: m.first(t) @ torch.softmax(t @ m.first.weight, -1),
    "norm": lambda m, t: m.first(F.layer_norm(t, (4,), m.second.bias)),
    "mask": lambda m, t: torch.where(t > 0, m.first(t), m.first.weight * t),
    "square": lambda m, t: (t * t * m.first.weight).sin() * t,
}
OWNERS = {"argument": lambda m, x: x, "buffer": lambda m, x: m.queue, "attribute": lambda m, x: m.scale}
CHANGES = {
    "data": lambda t: t.data.mul_(-1.3),
    "new data": lambda t: setattr(t, "data", t.data * 2),
    "counted": lambda t: t.mul_(2),
}


@pytest.mark.parametrize("owner", OWNERS)
@pytest.mark.parametrize("kind", MIXED)
def test_old_and_new_numbers_are_mixed_as_eager_mixes_them(kind, owner):
    def make():
        net = Net(lambda m, x: MIXED[kind](m, OWNERS[owner](m, x)))
        net.queue, net.scale = double(5, 4, 4), double(6, 4, 4)
        return net, None

    def step(m, _, i):
        found = []
        for name, change in CHANGES.items():
            if (kind, name) == ("views", "new data"):
                continue
            x = double(10 + i, 4, 4)
            y, tensor = m(x), OWNERS[owner](m, x)
            change(tensor)
            try:
                y.square().sum().backward()
            except RuntimeError as error:
                found.append("modified by an inplace operation" in str(error))
            else:
                found += [each.grad for each in m.parameters()]
            m.zero_grad()
        return found

    beside(make, step, lambda m, own: (double(9, 4, 4),))


RESULTS = {
    "clone": lambda m, x: torch.tanh(m.first(x)).clone(),
    "equal to what is saved": lambda m, x: torch.softmax(m.first(x), -1) + 0,
    "rows": lambda m, x: F.layer_norm(m.first(x), (4,)),
    "shares": lambda m, x: (e := m.first(x).exp()) / e.sum(-1, keepdim=True),
    "detached": lambda m, x: ((h := torch.tanh(m.first(x))).detach().clone(), m.second(h)),
    "first of two": lambda m, x: ((h := torch.tanh(m.first(x))).clone(), h, m.second(h)),
    "saved": lambda m, x: torch.tanh(m.first(x)),
    "saved, detached": lambda m, x: ((h := torch.tanh(m.first(x))).detach(), m.second(h)),
}
WRITES = {
    "counted": lambda t: t.detach().mul_(-1.5),
    "data": lambda t: t.data.mul_(-1.5),
    "numpy": lambda t: others_view(t.detach()).__imul__(-1.5),
    "new data": lambda t: setattr(t, "data", t.data * -1.5),
}


@pytest.mark.parametrize("kind", RESULTS)
def test_results_are_written_before_the_backward(kind):
    """A result that eager does not save may be written; for others, eager raises or reads the new numbers."""

    def step(m, _, i):
        found = []
        for write in WRITES.values():
            y = m(double(10 + i, 3, 4))
            results = y if isinstance(y, tuple) else (y,)
            loss = sum((each * 1.5).sum() for each in results if each.requires_grad)
            write(results[0])
            try:
                loss.backward()
            except RuntimeError as error:
                found.append("modified by an inplace operation" in str(error))
            else:
                found += [each.grad for each in m.parameters()]
            m.zero_grad()
        return found

    beside(lambda: (Net(RESULTS[kind]), None), step, lambda m, own: (double(9, 3, 4),))


def positive(m, x):
    return torch.exp(m.first(x))


WRITTEN = {
    "layer norm of it": (lambda m, x: F.layer_norm(x, (4,)) * m.first.bias, "argument"),
    "root mean square of it": (lambda m, x: F.rms_norm(x, (4,)) * m.first.bias, "argument"),
    "instance norm of it": (lambda m, x: F.instance_norm(x[None]) * m.first.bias, "argument"),
    "copy of it": (lambda m, x: m.first.bias * x.t().reshape(-1, 4), "argument"),
    "softmax of it": (lambda m, x: m.first.bias * torch.softmax(x, -1), "argument"),
    "mean of squares": (lambda m, x: F.mse_loss(m.first(x.detach() * 2), x), "argument"),
    "cross product": (lambda m, x: torch.linalg.cross(m.first(x * 2)[:, :3], x[:, :3]), "argument"),
    "weight of a norm": (lambda m, x: F.layer_norm(x * 2, (4,), m.first.bias), "parameter"),
    "distances": (lambda m, x: torch.cdist(m.first(x), m.second(x)), "result"),
    "product": (lambda m, x: m.first(x).prod(-1), "result"),
    "logarithm of a sum": (lambda m, x: m.first(x).logsumexp(-1), "result"),
    "power": (lambda m, x: positive(m, x) ** m.second(x), "result"),
    "sum": (lambda m, x: m.first(x).sum(-1), "result"),
}
"""Eager saves an argument, a parameter or the result, which the compiled backward does not read; or it saves a copy."""


@pytest.mark.parametrize("follows", [False, True], ids=["constant", "followed"])
@pytest.mark.parametrize("kind", WRITTEN)
def test_what_eager_alone_needs_is_an_error_too(kind, follows):
    forward, what = WRITTEN[kind]

    def step(m, _, i):
        x = double(10 + i, 4, 4).requires_grad_(follows)
        y = m(x)
        with torch.no_grad():
            {"argument": x, "parameter": m.first.bias, "result": y}[what].mul_(2)
        try:
            y.square().sum().backward()
        except RuntimeError as error:
            found = "modified by an inplace operation" in str(error)
        else:
            found = [each.grad for each in m.parameters()], x.grad
        m.zero_grad()
        return found

    beside(lambda: (Net(forward), None), step, lambda m, own: (double(9, 4, 4).requires_grad_(follows),))
