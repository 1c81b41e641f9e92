"""Half types, bit by bit on every number of the type: scalars are not rounded to it, each operator rounds once."""

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bridge import add_tvm_dispatch, stats
from tests.sampling import sampled


class Factors(nn.Module):
    """bfloat16(0.1) is 0.1001: rounded first, it would be off everywhere to the same side."""

    def forward(self, x: Tensor, y: Tensor, factor: Tensor) -> tuple[Tensor, ...]:
        return (
            x * 0.1,
            x / 0.1,
            x * factor,
            factor * x,
            x / factor,
            factor / x,
            x // 0.1,
            x * 257,
            torch.add(x, y, alpha=0.1),
            torch.sub(x, y, alpha=0.1),
            torch.rsub(x, y, alpha=0.1),
            x + 0.1,
            0.1 - x,
            x * 0.5,
        )


class Beside(nn.Module):
    """Devices differ in which numbers a kernel takes exactly, and which rounded to the half type."""

    def forward(self, x: Tensor, y: Tensor, factor: Tensor) -> tuple[Tensor, ...]:
        return (
            x + factor,
            factor - x,
            torch.add(x, 0.1, alpha=2),
            torch.add(factor, x, alpha=0.1),
            torch.rsub(x, 0.3, alpha=0.1),
            x == 0.1,
            x > 0.1,
            torch.remainder(x, 0.1),
            F.softshrink(x, 0.1),
            F.hardshrink(x, 0.1),
        )


class Curves(nn.Module):
    def forward(self, x: Tensor, y: Tensor, factor: Tensor) -> tuple[Tensor, ...]:
        near = x.clamp(-100, 100)
        return (
            F.leaky_relu(x, 0.1),
            F.selu(near),
            F.elu(near, 0.3),
            F.celu(near, 0.3),
            F.threshold(x, 0.1, 0.2),
            F.hardswish(near),
            torch.exp2(x),
            torch.log2(x),
            torch.log10(x),
            torch.sinc(near),
            F.softplus(x),
        )


@pytest.mark.parametrize(
    ("kind", "dtype"),
    sampled(
        itertools.product((Factors, Beside, Curves), (torch.float16, torch.bfloat16)),
        [(Factors, torch.float16), (Beside, torch.bfloat16), (Curves, torch.bfloat16)],
    ),
)
def test_every_number_is_eagers(kind, dtype):
    module = kind()
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    y = x[torch.randperm(x.numel(), generator=torch.Generator().manual_seed(0))]
    arguments = x, y, torch.tensor(0.1)
    add_tvm_dispatch(module, arguments)
    for index, (ours, eager) in enumerate(zip(module(*arguments), kind()(*arguments), strict=True)):
        assert ours.dtype == eager.dtype in (dtype, torch.bool)
        different = (ours != eager) & ~(ours.isnan() & eager.isnan())
        assert different.sum() <= 2, (
            f"result {index}: {x[different][:5]} -> {ours[different][:5]}, {eager[different][:5]}"
        )
    assert stats(module).hits == 1


class Norms(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.norm(dim=-1), x.norm(p=3, dim=-1), x.var(-1), x.std(-1), F.normalize(x)


def test_norms_neither_overflow_nor_lose_digits_in_float16():
    """A sum of squares of more than 65504 is infinite in float16; its root need not be."""
    torch.manual_seed(0)
    module = Norms()
    x = (torch.rand(7, 33) * 100 + 300).half().requires_grad_()
    values = x.detach().clone().requires_grad_()
    add_tvm_dispatch(module, x)
    ours, eager = module(x), Norms()(values)
    assert all(each.isfinite().all() for each in eager)
    for mine, other in zip(ours, eager, strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-3, atol=0)
    for results in (ours, eager):
        results[0].float().sum().backward()  # the gradient of the third order overflows in eager
    torch.testing.assert_close(x.grad, values.grad, rtol=2e-3, atol=0)
    assert stats(module).hits == 1
