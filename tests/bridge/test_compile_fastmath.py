"""The vectorized functions of float32 against float64, over the whole float range."""

from __future__ import annotations

import pytest
import torch
from tvm.relax import op as R

from bridge.compile.emit import Emitter
from bridge.compile.pointwise import RULES
from tests.bridge.compile_helpers import run

STEP = 2039  # prime: every exponent and well mixed mantissas, two million numbers

FUNCTIONS = {
    "exp": (R.exp, torch.exp, 2),
    "log": (R.log, torch.log, 2),
    "tanh": (R.tanh, torch.tanh, 3),
    "erf": (R.erf, torch.erf, 3),
    "sigmoid": (R.sigmoid, torch.sigmoid, 4),
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
    ours, exact, bound = FUNCTIONS[name]
    x = floats()
    (y,) = run([x], lambda emit, p: [emit(ours(p))])
    error = ulps(y, exact(x.double()))
    if name == "sigmoid":
        error = error[x > -88.0]  # documented: 0 where exp(-x) overflows
    record_property("ulp", float(error.max()))
    assert float(error.max()) <= bound, (name, float(error.max()), float(x[: error.numel()][error.argmax()]))


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


def test_log1p_is_accurate_near_zero_and_at_the_ends():
    x = floats()
    x = x[(x >= -1) | x.isnan()]
    # log1p is reached through softplus with a tiny beta-scaled argument nowhere; the rule itself is what is tested.
    (y,) = run([x], lambda emit, p: [emit(R.nn.softplus(p, beta=1.0, threshold=1e30))])
    exact = torch.log1p(torch.exp(x.double()))
    finite = x < 80
    assert float(ulps(y, exact)[finite].max()) <= 5


def test_rules_emit_one_vector_expression():
    """No rule for a function with a polynomial falls back to lanes: that would turn the loop scalar."""
    for name in ("exp", "log", "tanh", "erf", "sigmoid", "log1p"):
        emitter = Emitter(16)
        result = RULES[name](emitter, emitter.const(0.5, "float32"))
        assert str(result.ty) == "float32x16"
        assert not any("call_pure_extern" in str(stmt) or "Shuffle" in str(stmt) for stmt in emitter.stmts), name


def test_float64_uses_libm():
    x = torch.linspace(-30, 30, 1001, dtype=torch.float64)
    exp, tanh, erf = run([x], lambda emit, p: [emit(f(p)) for f in (R.exp, R.tanh, R.erf)])
    for ours, exact in ((exp, torch.exp(x)), (tanh, torch.tanh(x)), (erf, torch.erf(x))):
        torch.testing.assert_close(ours, exact, rtol=1e-14, atol=0)
