"""Means and variances of columns from sums that are added in one pass, in float64: fewer bytes, no less exact."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from tvm.relax import op

from bridge.compile import Launch, Program, compile_function
from bridge.compile.cpu.backend import CpuBackend, host_backend
from tests.bridge.compile_helpers import current_options, function

SHAPE = (6, 5, 7, 16)


@dataclass(frozen=True)
class AddsFloat64(CpuBackend):
    """This processor, as one that adds in float64 as quickly as in float32."""

    @property
    def adds_float64(self) -> bool:
        return True

    @property
    def key(self) -> str:
        return f"adds float64 {super().key}"


def compiled(made) -> tuple[Program, Program]:
    """As it is, and by sums in float64."""
    usual = host_backend()
    other = AddsFloat64(**{name: getattr(usual, name) for name in usual.__dataclass_fields__})
    options = current_options()
    return tuple(
        compile_function(made, name="moments", options=replace(options, backend=each)) for each in (usual, other)
    )


def moments(emit, x, about=None):
    wide = emit(op.astype(x, "float32"))
    mean = emit(op.mean(wide if about is None else about, [0, 1, 2], keepdims=True))
    centred = emit(op.subtract(wide, mean))
    variance = emit(op.mean(emit(op.multiply(centred, centred)), [0, 1, 2], keepdims=True))
    return [mean, variance, emit(op.multiply(centred, emit(op.rsqrt(variance))))]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("mean", [0.0, 3.0, 300.0, 3e4])
def test_no_less_exact(dtype, mean):
    usual, other = compiled(function([(SHAPE, dtype)], moments))
    assert len(launches(other)) < len(launches(usual))
    x = (torch.randn(SHAPE) * torch.logspace(-2, 1, 16) + mean).to(getattr(torch, dtype))
    wide = x.double()
    exact = wide.mean((0, 1, 2), keepdim=True), wide.var((0, 1, 2), unbiased=False, keepdim=True)
    for ours, theirs, wanted in zip(other([x]), usual([x]), exact, strict=False):
        far = [(each.double() - wanted).abs() for each in (ours, theirs)]
        assert (far[0] <= far[1] + 1e-7 * wanted.abs()).all()


def test_what_is_not_finite():
    usual, other = compiled(function([(SHAPE, "bfloat16")], moments))
    x = torch.randn(SHAPE).bfloat16()
    x[0, 0, 0, :4] = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e30])
    x[..., 5] = 7.0  # whose variance is nothing, not less
    for ours, theirs in zip(other([x])[:2], usual([x])[:2], strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.parametrize("types", [["bfloat16", "float32"], ["float32"]], ids=["another tensor's mean", "float32"])
def test_what_stays(types):
    usual, other = compiled(function([(SHAPE, each) for each in types], moments))
    assert list(map(str, launches(usual))) == list(map(str, launches(other)))


def launches(program: Program) -> list[Launch]:
    return [step for step in program.steps if isinstance(step, Launch)]
