"""``tensor.data`` in forward: read as ``detach()``, a buffer's written back, anything else that is written refused."""

import copy

import pytest
import torch
from torch import nn

from bridge import UnsupportedModule, add_tvm_dispatch, stats
from tests.sampling import sampled


class Block(nn.Module):
    def __init__(self, then):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.full((4,), 2.0))
        self.register_buffer("mean", torch.ones(4))
        self.then = then

    def forward(self, x):
        return self.then(self, x, self.linear(x))


def moving_average(m, x, y):
    m.mean.data.mul_(0.9).add_(y.data.mean(0), alpha=0.1)
    return y * m.mean


def own_copy(m, x, y):
    z = 2 * x
    z.data.add_(1)
    return m.linear(z) * y


def straight_through(m, x, y):
    return y + (y.round() - y).data


def is_a_leaf(m, x, y):
    return y * y.data if y.data.is_leaf and not y.data.requires_grad else y


def binarized(m, x, y):
    y = nn.functional.hardtanh(y)
    y.data = y.data.sign()
    with torch.no_grad():
        z = m.linear(y)
        z.data = z + 1
    return m.linear(y) * y + z


def set_twice(m, x, y):
    y = y.exp()
    y.data = y.data + 1
    y.data = y.data * 3
    return y[:2].sum() * y


READ = [
    binarized,
    set_twice,
    moving_average,
    own_copy,
    straight_through,
    is_a_leaf,
    lambda m, x, y: nn.functional.linear(y, m.linear.weight.data, m.linear.bias),
    lambda m, x, y: (y, y.data, m.scale.data),
    lambda m, x, y: y / m.linear.weight.data.norm() * m.scale,
]


@pytest.mark.parametrize("then", sampled(READ, READ[:-1]))
def test_reading_data(then):
    module = Block(then)
    eager, x = copy.deepcopy(module), torch.randn(5, 4)
    add_tvm_dispatch(module, x)
    for _ in range(3):
        mine, theirs = (each(x) for each in (module, eager))
        torch.testing.assert_close(mine, theirs)
        for result in (mine, theirs):
            (result[0] if isinstance(result, tuple) else result).square().sum().backward()
        if isinstance(mine, tuple):
            assert [each.requires_grad for each in mine] == [each.requires_grad for each in theirs]
    assert stats(module).hits == 3
    torch.testing.assert_close(module.state_dict(), eager.state_dict())
    for mine, theirs in zip(module.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


WRITTEN = {
    "a parameter's": (lambda m, x, y: (m.scale.data.clamp_(-1, 1), y * m.scale)[1], "clamp_: changes a parameter"),
    "an argument's": (lambda m, x, y: (x.data.add_(1), y)[1], "changes a tensor that was passed"),
    "what autograd reads": (lambda m, x, y: (y.data.add_(1), y * y)[1], "autograd sees under another name"),
    "set": (lambda m, x, y: (setattr(y, "data", x), y)[1], "Tensor.data ="),
    "set, read before": (lambda m, x, y: (y.square(), setattr(y, "data", y.data * 2))[0] * y, "Tensor.data ="),
    "set, then written": (lambda m, x, y: (setattr(y, "data", y.data * 2), y.mul_(2))[1], "mul_"),
    "a parameter's set": (lambda m, x, y: (setattr(m.scale, "data", x[0]), y * m.scale)[1], "Tensor.data ="),
    "a gradient set": (lambda m, x, y: (setattr(m.scale, "grad", None), y * m.scale)[1], "Tensor.grad ="),
}


@pytest.mark.parametrize(("then", "words"), WRITTEN.values(), ids=WRITTEN)
def test_writing_data_is_refused(then, words):
    module, x = Block(then), torch.randn(5, 4)
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(UnsupportedModule, match=words):
        add_tvm_dispatch(module, x.clone().requires_grad_())
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)


def to_the_same(m, x, y):
    m.scale.data = m.scale.data.to(x.device)
    m.linear.weight.data = m.linear.weight.data.to(x.dtype)
    return y * m.scale


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_data_that_is_set_to_itself_is_no_change(mode):
    module, x = getattr(Block(to_the_same), mode)(), torch.randn(3, 4)
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, x)
    for each in (module, eager):
        each(x).square().sum().backward()
    torch.testing.assert_close(module.scale.grad, eager.scale.grad)
    assert stats(module).hits == 1
