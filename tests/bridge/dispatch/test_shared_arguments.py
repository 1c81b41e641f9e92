"""Arguments that share memory in the sample: a result is a view of the argument whose view eager returns."""

import pytest
import torch
from torch import nn
from torch.export import Dim

from bridge import add_tvm_dispatch, stats


class Views(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, 4))

    def forward(self, x, y):
        return x.sin() * self.weight[0], y.unsqueeze(0), x[1:], y


def memory() -> torch.Tensor:
    return torch.arange(24.0).reshape(6, 4)


PAIRS = {
    "apart": lambda module: (memory(), memory() + 1),
    "the same": lambda module: (memory(),) * 2,
    "a part": lambda module: ((x := memory()), x[2:]),
    "another part": lambda module: ((x := memory()), x[1:5]),
    "overlapping": lambda module: ((x := memory())[:4], x[2:]),
    "the parameter": lambda module: (memory(), module.weight),
}


@pytest.mark.parametrize("sample", PAIRS)
def test_results_are_views_of_what_eager_returns_views_of(sample):
    module = Views()
    add_tvm_dispatch(module, PAIRS[sample](module))
    hits = 0
    for make in PAIRS.values():
        given = make(module)
        results, wanted = module(*given), Views.forward(module, *given)
        for result, eager in zip(results[1:], wanted[1:], strict=True):
            assert result.data_ptr() == eager.data_ptr() and result.stride() == eager.stride(), sample
        torch.testing.assert_close(results, wanted)
        hits += stats(module).hits
    assert hits


def test_gradients_reach_the_argument_that_the_result_is_made_of():
    module = Views()
    x = memory().requires_grad_()
    add_tvm_dispatch(module, (x, x))
    x, y = (memory().requires_grad_() for _ in range(2))
    module(x, y)[1].sum().backward()
    assert stats(module).hits == 1 and x.grad is None and torch.equal(y.grad, torch.ones(6, 4))


@pytest.mark.skipif(torch.__version__ < "2.13", reason="dynamic_shapes wants torch 2.13")
def test_of_a_size_that_varies():
    module, rows = Views(), Dim("rows", min=2, max=9)
    add_tvm_dispatch(module, (memory(),) * 2, dynamic_shapes={"x": {0: rows}, "y": {0: rows}})
    x, y = torch.ones(3, 4), torch.zeros(3, 4)
    assert module(x, y)[1].data_ptr() == y.data_ptr() and module(x, y)[2].data_ptr() == x[1:].data_ptr()
    assert stats(module).hits == 2
