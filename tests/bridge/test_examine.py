"""``examine`` lists the refusals of ``add_tvm_dispatch`` before compiling."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bridge import UnsupportedModule, add_tvm_dispatch, examine
from tests.bridge.models import MLP


class Mixed(nn.Module):
    """Four operations that are handled, and two that make tensors of other kinds."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).tanh()
        values = y.to_sparse().to_dense()
        waves = torch.view_as_complex(y.half().reshape(-1, 2)).real.float()
        return values.sum() + waves.sum()


def test_a_supported_module_is_covered_entirely():
    coverage = examine(MLP(), torch.randn(7, 6))
    assert coverage.percentage == 100
    assert not coverage.unsupported
    assert coverage.operations["aten.linear.default"] == 2
    assert "nothing stands in the way" in str(coverage)


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_what_is_missing_is_named_with_its_line():
    torch.empty(1, dtype=torch.complex32)  # torch warns once in a process, which is no error where no code of ours runs
    module, x = Mixed(), torch.randn(4, 4)
    coverage = examine(module, x)
    refused = {problem.op for problem in coverage.unsupported}
    assert refused == {"aten._to_sparse.default", "aten._to_dense.default", "aten.view_as_complex.default"}
    assert 0 < coverage.percentage < 100
    assert set(coverage.supported).isdisjoint(refused)
    text = str(coverage)
    assert "y.to_sparse()" in text and "torch.view_as_complex(" in text
    assert f"{len(coverage.supported)} of {len(coverage.operations)} distinct operations" in text


def test_add_refuses_with_the_same_list():
    module, x = Mixed(), torch.randn(4, 4)
    coverage = examine(module, x)
    with pytest.raises(UnsupportedModule) as refusal:
        add_tvm_dispatch(module, x)
    assert refusal.value.ops == coverage.unsupported


def test_nothing_is_changed():
    module, x = MLP(dropout=0.5), torch.randn(7, 6)
    before, state = dict(module.__dict__), torch.get_rng_state()
    examine(module, x)
    assert module.__dict__ == before
    assert torch.equal(torch.get_rng_state(), state)


def test_no_graph_at_all():
    class Branches(nn.Module):
        def forward(self, x):
            return x * len(torch.unique(x))

    coverage = examine(Branches(), torch.randn(3))
    assert coverage.percentage == 0
    assert "data-dependent" in coverage.unsupported[0].op
    assert "torch.unique(x)" in coverage.unsupported[0].where


def test_wrong_module():
    with pytest.raises(TypeError, match=r"nn\.Module"):
        examine(torch.relu, torch.randn(3))
