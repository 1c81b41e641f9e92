"""Operators' further results: computed, or refused by name where a module returns an unsupported one."""

import pytest
import torch
from torch import nn
from tvm import relax

from bridge import UnsupportedModule, add_tvm_dispatch
from bridge.aten.registry import CONVERSIONS
from tests.bridge.compare import check_module


class Normalized(nn.Module):
    def __init__(self, training: bool):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(3)), nn.Parameter(torch.rand(3))
        self.register_buffer("mean", torch.rand(3))
        self.register_buffer("variance", torch.rand(3))
        self.is_training = training

    def forward(self, x):
        return torch.native_batch_norm(x, self.weight, self.bias, self.mean, self.variance, self.is_training, 0.1, 1e-5)


@pytest.mark.parametrize("training", [pytest.param(False, marks=pytest.mark.cpu("a GPU's saves the means")), True])
def test_what_batch_normalization_saves_is_returned(training):
    """With running statistics it saves nothing: tensors without elements."""
    check_module(lambda: Normalized(training), lambda: torch.randn(4, 3, 5, requires_grad=True), rtol=1e-8)


class AllOfAGroupNorm(nn.Module):
    def forward(self, x):
        return torch.native_group_norm(x, None, None, 4, 6, 5, 2, 1e-5)


def test_a_result_that_is_not_computed_is_refused_by_name(monkeypatch):
    """TVM ends the process where a tuple holds nothing."""
    operator = torch.ops.aten.native_group_norm.default
    convert = CONVERSIONS[operator]
    monkeypatch.setitem(CONVERSIONS, operator, lambda *given: (convert(*given)[0], None, None))
    with pytest.raises(UnsupportedModule, match=r"native_group_norm.*its result 1 is used") as refusal:
        add_tvm_dispatch(AllOfAGroupNorm(), torch.randn(4, 6, 5))
    assert len(refusal.value.ops) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda mean: relax.op.concat([mean, mean], 1), r"float32\[4, 2\], its conversion makes float32\[4, 4\]"),
        (lambda mean: relax.op.astype(mean, "float64"), r"float32\[4, 2\], its conversion makes float64\[4, 2\]"),
    ],
)
def test_a_result_of_another_form_than_eagers_is_refused_by_name(change, words, monkeypatch):
    operator = torch.ops.aten.native_group_norm.default
    convert = CONVERSIONS[operator]

    def changed(importer, node, *args):
        y, mean, rstd = convert(importer, node, *args)
        return y, importer.emit(change(mean)), rstd

    monkeypatch.setitem(CONVERSIONS, operator, changed)
    with pytest.raises(UnsupportedModule, match="native_group_norm.default: eager returns " + words):
        add_tvm_dispatch(AllOfAGroupNorm(), torch.randn(4, 6, 5))
