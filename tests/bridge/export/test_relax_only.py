"""Library calls spelled out in Relax: the same numbers; operators of torch alone are named."""

from __future__ import annotations

import pytest
import torch
import tvm
from torch import nn
from torch.nn import functional as F

from autodiff.ir import bindings, library_name
from bridge import lower
from bridge.export.native import NoRelaxForm, without_library_calls
from bridge.state import module_tensors
from tests.bridge.compare import Function
from tests.sampling import sampled, spread


class Rows(nn.Module):
    def forward(self, x, rows, columns):
        return x[rows[:, None], columns], x[:, columns], x[:, :, rows], x[rows, :, columns]


def heads(*extents: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(2, 3, *extents, dtype=torch.float64) for _ in range(3))


def images(*extents: int) -> torch.Tensor:
    return torch.randn(2, 4, *extents, dtype=torch.float64)


def decoded(x, index):
    for _ in range(5):
        x = torch.tanh(torch.index_select(x, 0, index)) * x
    return x


def run_by_tvm(function, values) -> list[torch.Tensor]:
    """The results of a Relax function in TVM's virtual machine."""
    built = tvm.relax.build(tvm.IRModule({"main": function.with_attr("global_symbol", "main")}), "llvm")
    machine = tvm.relax.VirtualMachine(built, tvm.cpu())
    arguments = [tvm.runtime.tensor(each.detach().numpy()) for each in values]
    return [torch.from_dlpack(each) for each in machine["main"](*arguments)]


MASK = torch.tensor([[True, False, True, True, True]] * 3 + [[False] * 5, [True] * 5])
CASES = {
    "embedding": (nn.Embedding(9, 4), (torch.randint(0, 9, (2, 3)),)),
    "index_select": (Function(lambda x, i: torch.index_select(x, 1, i)), (images(5), torch.tensor([1, 0]))),
    "a loop": (Function(lambda x, i: decoded(x, i)), (images(5), torch.tensor([1, 0]))),
    "rows and columns": (Rows(), (torch.randn(4, 5, 6), torch.tensor([0, -1, 2]), torch.tensor([-5, 3, 1]))),
    "convolution": (nn.Conv2d(4, 6, 3, 2, 1, groups=2), (images(7, 6),)),
    "one axis": (nn.Conv1d(4, 6, 3, dilation=2), (images(9),)),
    "three axes": (nn.Conv3d(4, 6, 2), (images(3, 4, 5),)),
    "transposed": (nn.ConvTranspose2d(4, 6, 3, 2, 1, 1), (images(5, 4),)),
    "max_pool": (nn.MaxPool2d(3, 2, 1), (images(7, 6),)),
    "max_pool, ceil": (nn.MaxPool2d(2, ceil_mode=True), (images(7, 5),)),
    "avg_pool": (nn.AvgPool2d(3, 2, 1), (images(7, 6),)),
    "avg_pool, inside": (nn.AvgPool2d(3, 2, 1, count_include_pad=False), (images(7, 6),)),
    "adaptive": (nn.AdaptiveAvgPool2d((3, 2)), (images(7, 5),)),
    "attention": (Function(lambda q, k, v: F.scaled_dot_product_attention(q, k, v)), heads(5, 4)),
    "causal": (Function(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)), heads(5, 4)),
    "masked": (
        Function(lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, mask, scale=0.3)),
        (*heads(5, 4), MASK),
    ),
}


@pytest.mark.parametrize("name", sampled(CASES, spread(CASES)))
def test_the_numbers_stay(name):
    torch.manual_seed(0)
    module, given = CASES[name]
    module = module.double()
    with torch.no_grad():
        lowered = lower(module, given)
        wanted = module(*given)
    function = lowered["forward"].function
    spelled = without_library_calls(function)
    assert any(library_name(value) for _, value in bindings(function))
    assert not any(library_name(value) for _, value in bindings(spelled))
    found = run_by_tvm(spelled, [*module_tensors(module)[1], *given])
    for one, other in zip(found, wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("module", "x", "words"),
    [
        (nn.AdaptiveMaxPool2d(2), images(5, 5), "adaptive_max_pool"),
        (nn.MaxPool2d(2, return_indices=True), images(4, 4), "second result of library.max_pool"),
        (Function(lambda x: x.sort().values), images(4, 4), "sort"),
    ],
)
def test_what_only_torch_computes_is_named(module, x, words):
    with torch.no_grad():
        function = lower(module, x)["forward"].function
    with pytest.raises(NoRelaxForm, match=words):
        without_library_calls(function)
