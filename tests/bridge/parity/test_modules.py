"""The contracts of autograd, one small module each: which gradients exist, where they stop, the shapes of results."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bridge import UnsupportedModule, add_tvm_dispatch, stats
from tests.bridge import models
from tests.bridge.compare import Call, check_module
from tests.sampling import sampled


def rows(requires_grad: bool = True) -> torch.Tensor:
    return torch.randn(7, 6, requires_grad=requires_grad)


KINDS = [
    models.MLP,
    models.TwoOutputs,
    models.NonDifferentiable,
    models.Frozen,
    models.ReturnsDict,
    models.ReturnsList,
    models.ReturnsNested,
    models.ReturnsInput,
    models.ReturnsTwice,
    models.ReturnsParameter,
    models.UsedTwice,
    models.Unused,
    models.SharedSubmodule,
    models.Detached,
    models.DetachedOutput,
    models.NoGradBlock,
    models.Branches,
]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, torch.float64) for kind in KINDS),
        *sampled([(kind, torch.float32) for kind in (models.MLP, models.Branches)], [(models.MLP, torch.float32)]),
    ],
    ids=str,
)
def test_module(kind, dtype):
    check_module(kind, rows, dtype=dtype)


def test_tied_weights():
    check_module(models.Tied, lambda: torch.randint(0, 11, (3, 5)))


@pytest.mark.parametrize(
    "kind", [models.MLP, models.TwoOutputs, models.Detached, models.NoGradBlock, models.ReturnsInput]
)
def test_input_that_does_not_require_grad(kind):
    check_module(kind, lambda: rows(requires_grad=False))


def test_nothing_requires_grad():
    """Grad mode is on, and still there is nothing to differentiate: the result must not require grad."""
    check_module(lambda: models.MLP().requires_grad_(False), lambda: rows(requires_grad=False))


def test_only_the_input_requires_grad():
    check_module(lambda: models.MLP().requires_grad_(False), rows)


def test_eval_mode_has_its_own_entry():
    check_module(lambda: models.MLP(dropout=0.5).eval(), rows)


def test_dropout():
    check_module(lambda: models.MLP(dropout=0.3), rows)


def test_functional_dropout_on_a_shared_tensor():
    class Shared(nn.Module):
        def forward(self, x):
            return F.dropout(x, 0.5) + F.dropout(x, 0.5), F.dropout(x, 0.1)

    check_module(Shared, rows)


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_dropout_at_its_ends(p):
    check_module(lambda: models.MLP(dropout=p), rows)


def test_buffers_a_module_updates_itself():
    check_module(models.Counting, rows, calls=3)


def test_buffers_are_updated_in_eval_and_without_a_gradient_as_well():
    check_module(lambda: models.Counting().requires_grad_(False), lambda: rows(requires_grad=False), calls=3)


def test_batch_norm():
    check_module(lambda: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU()), rows, calls=3)


def test_layer_norm_and_embedding():
    check_module(
        lambda: nn.Sequential(nn.Embedding(11, 6, padding_idx=0), nn.LayerNorm(6)),
        lambda: torch.tensor([[0, 3, 3], [10, 0, 1]]),
    )


def test_nested_arguments():
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 5)

        def forward(self, pair, *, options, scale=None):
            left, right = pair
            y = self.linear(left) * options["weight"] + self.linear(right)
            return y if scale is None else y * scale

    check_module(
        Nested,
        lambda: Call(((rows(), rows(requires_grad=False)),), {"options": {"weight": torch.randn(5)}, "scale": None}),
    )


def test_number_and_none_arguments():
    class Scaled(nn.Module):
        def forward(self, x, mask, scale, flag):
            y = x * scale if flag else x
            return y if mask is None else y + mask

    check_module(Scaled, lambda: (rows(), None, 2.5, True))


def test_one_tensor_for_two_arguments():
    class Product(nn.Module):
        def forward(self, a, b):
            return a * torch.exp(b)

    def inputs():
        x = rows()
        return x, x

    check_module(Product, inputs)


def test_arguments_that_are_views_and_not_contiguous():
    check_module(models.MLP, lambda: torch.randn(6, 7).t().requires_grad_())


def test_non_leaf_input():
    """The gradient flows on into the operator that produced the input."""
    torch.manual_seed(0)
    module = models.MLP().double()
    x = torch.randn(7, 6, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad(module(torch.sin(x)).square().sum(), x)
    add_tvm_dispatch(module, torch.sin(x).detach().requires_grad_())
    actual = torch.autograd.grad(module(torch.sin(x)).square().sum(), x)
    assert stats(module).hits == 1
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


def test_zero_sized_batch():
    """Eager runs a batch of no rows; dispatch must either give the same or refuse."""
    try:
        check_module(models.MLP, lambda: torch.randn(0, 6, requires_grad=True))
    except UnsupportedModule as refusal:
        assert refusal.ops


def test_output_that_is_an_input_shares_its_memory():
    module = models.ReturnsInput()
    x = rows()
    add_tvm_dispatch(module, x)
    first, _ = module(x)
    assert stats(module).hits == 1
    assert first.data_ptr() == x.data_ptr()


def test_result_types_are_kept():
    """A named tuple and a HuggingFace ModelOutput come back as themselves, with attribute access."""
    module = models.bert_model()
    inputs = {"input_ids": models.tokens()}
    expected = type(module(**inputs))
    add_tvm_dispatch(module, inputs)
    result = module(**inputs)
    assert stats(module).hits == 1
    assert type(result) is expected
    assert result.last_hidden_state.shape == (3, 17, 24)
    assert list(result.keys()) == ["last_hidden_state", "pooler_output"]
