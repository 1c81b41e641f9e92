"""Writes that autograd does not see, under ``no_grad`` or through ``detach``, into memory that it tracks.

The numbers are the new ones; the gradient passes the write unchanged, as in eager.
"""

import pytest
import torch
from torch import distributions, nn

from bridge import UnsupportedModule, add_tvm_dispatch
from tests.bridge.compare import check_module
from tests.device import DEVICE
from tests.sampling import sampled


class Written(nn.Module):
    def __init__(self, then):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.then = then

    def forward(self, x):
        return self.then(self, x, self.linear(x))


def detached(m, x, h):
    h.detach().clamp_(min=0.1)
    return h * 2


def detached_twice(m, x, h):
    d = h.detach()
    d.mul_(2)
    d.add_(1)
    return h.sin(), d.cos()


def read_before(m, x, h):
    d = h.detach()
    d.sub_(d.mean())
    return h.sin() + d


def seen_in_a_view(m, x, h):
    flat = h.view(-1)
    h.detach().clamp_(min=0)
    return flat.sin() + h.flatten()


def one_row(m, x, h):
    h[1].detach().fill_(5.0)
    return h.sin()


def clamped(m, x, h):
    with torch.no_grad():
        h.clamp_(-0.1, 0.1)
    return h.sin()


def of_itself(m, x, h):
    with torch.no_grad():
        h.mul_(h).add_(x)
    return h.sin()


def in_parts(m, x, h):
    with torch.no_grad():
        h[0] = 7.0
        h[:, 1].zero_()
        h[x > 1] = 2.0
    return h.sin()


def drawn(m, x, h):
    with torch.no_grad():
        h.mul_(torch.rand_like(h) > 0.3).uniform_()
    return h * x


def partly_tracked(m, x, h):
    out = torch.zeros_like(h)
    with torch.no_grad():
        out[0] = 1
    out[1:] = h[1:]
    with torch.no_grad():
        out[2] *= 2
    return out * x


def in_steps(m, x, h):
    """Steps that are equal, but no loop: a step's gradient would end at its write."""
    for _ in range(6):
        h = torch.tanh(m.linear(h)) + x
        h.detach().clamp_(-0.5, 0.5)
    return h


def gamma(m, x, h):
    return distributions.Gamma(h.exp(), x.exp()).rsample()


def student(m, x, h):
    drawn = distributions.StudentT(h.exp() + 1, x)
    return drawn.rsample(), drawn.log_prob(x)


WRITES = [detached, clamped, in_steps, gamma, detached_twice, read_before, seen_in_a_view, one_row, of_itself, in_parts]
WRITES += [drawn, partly_tracked, student]


@pytest.mark.parametrize("then", sampled(WRITES, WRITES[:5]))
def test_a_write_passes_the_gradient_on(then):
    if then in (gamma, student) and DEVICE.type == "cuda":
        pytest.skip("a GPU's draws of a gamma distribution are refused")
    check_module(lambda: Written(then), lambda: torch.randn(5, 4, requires_grad=True))


def old_view(m, x, h):
    d = h.detach()
    view = d.view(-1)
    d.clamp_(min=0)
    return h * 1, view


def with_gradient(m, x, h):
    d = h.detach()
    d.mul_(m.linear(x).sum())
    return d, h * 2


def several(m, x, h):
    with torch.no_grad():
        torch.max(x, 0, out=(h[0], torch.empty(4, dtype=torch.long)))
    return h * 2


@pytest.mark.parametrize("then", [old_view, with_gradient, several])
def test_a_write_that_would_show_is_refused(then):
    with pytest.raises(UnsupportedModule, match="under another name"):
        add_tvm_dispatch(Written(then), torch.randn(5, 4))
