"""The vectorized functions of float32 against float64, over the whole float range."""

from __future__ import annotations

import pytest
import torch
from tvm.relax import op as R

from autodiff.library import call
from bridge.compile.codegen.emit import Emitter
from bridge.compile.codegen.pointwise import RULES
from tests.bridge.compile_helpers import run

STEP = 2039  # prime: every exponent and well mixed mantissas, two million numbers


def library(name):
    return lambda x: call(name, [x], x.ty)


# Relax operator, the function in float64, units in the last place, the numbers for which the bound is promised.
FUNCTIONS = {
    "exp": (R.exp, torch.exp, 1, None),
    "log": (R.log, torch.log, 1, None),
    "tanh": (R.tanh, torch.tanh, 1.5, None),
    "erf": (R.erf, torch.erf, 1.5, None),
    "sigmoid": (R.sigmoid, torch.sigmoid, 2.5, lambda x: ~(x < -88.0)),  # documented: 0 where exp(-x) overflows
    "log1p": (library("log1p"), torch.log1p, 1.5, None),
    "expm1": (library("expm1"), torch.expm1, 1.5, None),
}


def floats() -> torch.Tensor:
    """Bit patterns in equal steps: both signs, denormals, all exponents, inf and nan at the end."""
    bits = torch.arange(-(2**31), 2**31, STEP, dtype=torch.int64).to(torch.int32)
    special = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-45, 88.72283, 88.722839, -103.97])
    return torch.cat([bits.view(torch.float32), special])


def ulps(ours: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Distance from the float64 value in units in the last place of float32 (denormals: of the smallest number)."""
    rounded = exact.float()
    _, exponent = torch.frexp(rounded.double().abs().clamp_min(2.0**-126))
    unit = torch.ldexp(torch.ones_like(exact), exponent - 24)
    error = (ours.double() - exact).abs() / unit
    same = (ours == rounded) | (ours.isnan() & rounded.isnan())
    return torch.where(same, 0.0, error)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_error_over_the_whole_range(name, record_property):
    ours, function, bound, promised = FUNCTIONS[name]
    x = floats()
    (y,) = run([x], lambda emit, p: [emit(ours(p))])
    exact = function(x.double())
    if promised is not None:
        inside = promised(x)
        x, y, exact = x[inside], y[inside], exact[inside]
    error = ulps(y, exact)
    worst = float(error.max())
    record_property("ulp", worst)
    print(f"{name}: at most {worst:.2f} units in the last place, at {float(x[error.argmax()])!r}")
    assert worst <= bound
    assert torch.equal(y.isnan(), exact.isnan())
    assert torch.equal(y.isinf(), exact.float().isinf())


def test_exact_values():
    inf = float("inf")
    x = torch.tensor([-inf, inf, 0.0, -0.0, 1.0])
    exp, log, tanh, erf, sigmoid = run(
        [x], lambda emit, p: [emit(f(p)) for f in (R.exp, R.log, R.tanh, R.erf, R.sigmoid)]
    )
    assert exp.tolist() == [0.0, inf, 1.0, 1.0, pytest.approx(2.718281828, rel=2e-7)]
    assert log[1:].tolist() == [inf, -inf, -inf, 0.0] and log[0].isnan()
    assert tanh[:2].tolist() == [-1.0, 1.0] and erf[:2].tolist() == [-1.0, 1.0]
    assert torch.signbit(tanh).tolist() == [True, False, False, True, False]
    assert torch.signbit(erf).tolist() == [True, False, False, True, False]
    assert sigmoid[:3].tolist() == [0.0, 1.0, 0.5]


def test_exact_values_of_the_functions_around_one():
    inf = float("inf")
    x = torch.tensor([-inf, -2.0, -1.0, -0.0, 0.0, 1e-45, -3e-45, inf])
    log1p, expm1 = run([x], lambda emit, p: [emit(library(name)(p)) for name in ("log1p", "expm1")])
    assert log1p[:2].isnan().all() and log1p[2:].tolist() == [-inf, -0.0, 0.0, *x[5:7].tolist(), inf]
    assert expm1[0] == -1.0 and expm1[3:].tolist() == [-0.0, 0.0, *x[5:7].tolist(), inf]
    assert torch.signbit(log1p[3:5]).tolist() == torch.signbit(expm1[3:5]).tolist() == [True, False]


def test_rules_emit_one_vector_expression():
    """No rule for a function with a polynomial falls back to lanes: that would turn the loop scalar."""
    for name in FUNCTIONS:
        emitter = Emitter(16)
        result = RULES[name](emitter, emitter.const(0.5, "float32"))
        assert str(result.ty) == "float32x16"
        assert not any("call_pure_extern" in str(stmt) or "Shuffle" in str(stmt) for stmt in emitter.stmts), name


def test_float64_uses_libm():
    x = torch.linspace(-30, 30, 1001, dtype=torch.float64)
    results = run([x], lambda emit, p: [emit(ours(p)) for ours, *_ in FUNCTIONS.values()])
    for ours, (_, exact, *_) in zip(results, FUNCTIONS.values(), strict=True):
        torch.testing.assert_close(ours, exact(x), rtol=1e-14, atol=0, equal_nan=True)
