"""Memory that ``.data`` writes between forward and backward: an operator's gradient reads eager's numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.bridge.beside import beside, double
from tests.device import DEVICE
from tests.sampling import sampled

OPERATORS = {
    # own formulas, of several steps
    "quotient": lambda x, y, w: x / y,
    "quotient of a parameter": lambda x, y, w: w / x,
    "reciprocal": lambda x, y, w: x.reciprocal(),
    "root as a power": lambda x, y, w: x**0.5,
    "norm": lambda x, y, w: x.norm(dim=-1),
    "matrix norm": lambda x, y, w: torch.linalg.matrix_norm(x),
    "pairwise distance": lambda x, y, w: F.pairwise_distance(x, y),
    "cosine": lambda x, y, w: F.cosine_similarity(x, y),
    "deviation": lambda x, y, w: x.std(-1),
    "variance and mean": lambda x, y, w: torch.var_mean(x, -1)[0],
    "layer norm": lambda x, y, w: F.layer_norm(x, (4,), w[0], w[1]),
    "layer norm without weights": lambda x, y, w: F.layer_norm(x, (4,)),
    "layer norm of an argument's weights": lambda x, y, w: F.layer_norm(x, (4,), y[0]),
    "root mean square": lambda x, y, w: F.rms_norm(x, (4,), w[0]),
    "batch norm": lambda x, y, w: F.batch_norm(x, None, None, w[0], w[1], True),
    "group norm": lambda x, y, w: F.group_norm(x, 2, w[0], w[1]),
    "instance norm": lambda x, y, w: F.instance_norm(x[None], weight=w[0]),
    # autograd's formula is one, ours of the operators that it is made of
    "squared error": lambda x, y, w: F.mse_loss(x, y),
    "cross product": lambda x, y, w: torch.linalg.cross(x[:, :3], y[:, :3]),
    "softsign": lambda x, y, w: F.softsign(x),
    # torch's own kernel and formula
    "distances": lambda x, y, w: torch.cdist(x, y),
    "distances within": lambda x, y, w: F.pdist(x),
    "product": lambda x, y, w: x.prod(-1),
    "products": lambda x, y, w: x.cumprod(-1),
    "hypotenuse": lambda x, y, w: torch.hypot(x, y),
    "inverse": lambda x, y, w: torch.linalg.inv(x + 3 * torch.eye(4, dtype=x.dtype)),
    "determinant": lambda x, y, w: torch.linalg.det(x),
    # of a parameter alone
    "weight norm": lambda x, y, w: F.linear(x, torch._weight_norm(w, w[:, :1], 0)),
    "unit rows": lambda x, y, w: F.linear(x, w / w.norm(dim=1, keepdim=True)),
    "curve of a weight": lambda x, y, w: F.linear(x, w.tanh()),
    "exponential of a weight": lambda x, y, w: x * w.exp(),
    "weight many times": lambda x, y, w: torch.gru_cell(x, y, w.repeat(3, 1), w.repeat(3, 1)),
}


def positive(seed: int, follows: bool = True) -> torch.Tensor:
    return double(seed, 4, 4).abs().add(0.1).requires_grad_(follows)


class Operator(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.weight = function, nn.Parameter(positive(3))

    def forward(self, x, y):
        return self.function(x, y, self.weight)


KERNELS_OF_A_GPU = ("root mean square", "weight norm")
ALWAYS = ["quotient", "norm", "layer norm", "root mean square", "squared error", "distances", "curve of a weight"]


@pytest.mark.parametrize("name", sampled([*OPERATORS], ALWAYS))
def test_gradients_read_what_eager_reads(name):
    """Writes the arguments, the parameter and the result in turn; autograd saves each, or a value computed from it."""
    if DEVICE.type != "cpu" and name in KERNELS_OF_A_GPU:
        pytest.skip("a gradient may use other numbers, as docs/limits.md says")

    def step(m, _, i):
        found = []
        for written in range(4):
            x, y = positive(10 + i), positive(20 + i)
            with torch.no_grad():
                m.weight.copy_(positive(30 + i))
            result = m(x, y)
            memory = (x, y, m.weight, result)[written].data
            memory.copy_(memory.flip(0) * 0.7 + 0.11 if memory.dim() else memory * 0.7 + 0.11)
            result.backward(double(5, *result.shape))
            found += [None if each.grad is None else each.grad.clone() for each in (x, y, m.weight)]
            m.zero_grad()
        return found

    beside(lambda: (Operator(OPERATORS[name]), None), step, lambda m, _: (positive(1), positive(2)), steps=2)
