"""Polynomial approximations of transcendental functions of float32 on vectors, after range reduction; no libm calls.

An extern call inside a vector loop turns the whole loop scalar; these let GELU, softmax and similar operators run at
memory speed. The polynomials are Chebyshev interpolations made for this file (of a degree that keeps their own error
below half an ulp), evaluated in fused multiply-adds. Errors, in units in the last place (ulp) against the float64
function over the whole float32 range (``tests/bridge/compile/test_fastmath.py``):

=========== ====== =============================================================================================
function    ulp    notes
=========== ====== =============================================================================================
exp         1      ``exp(-inf) == 0``; overflow to inf, gradual underflow through denormals; nan stays nan
log         1      ``log(0) == -inf``, denormals exact, negative numbers nan
tanh        1.5    odd, ``tanh(±inf) == ±1``
erf         1.5    odd, ``erf(±inf) == ±1``
sigmoid     2.5    flushes to 0 below -88.73, where ``exp(-x)`` overflows (as eager torch does)
log1p       1.5    for every x > -1; ``log1p(-1) == -inf``, nan below
expm1       1.5    ``expm1(-inf) == -1``; overflow to inf; keeps the sign of zero
=========== ====== =============================================================================================

``float64`` goes lane by lane through libm, as does ``float32`` if the target's library is faster
(:meth:`~bridge.compile.codegen.emit.Emitter.has_library`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from tvm import tirx
from tvm.tirx import Expr

from bridge.compile.codegen.emit import Emitter, element_type

__all__ = ["erf", "exp", "expm1", "gaussian", "log", "log1p", "normal_cdf", "sigmoid", "tanh"]

_LN2_HIGH = 0.693359375  # 10 bits: exact times any exponent
_LN2_LOW = math.log(2.0) - _LN2_HIGH
_EXP = [0.5000000013538729, 0.1666666668170344, 0.04166646419741811, 0.008333310844836598]
_EXP += [0.0013933730714463612, 0.0001989108035468924]
_TANH = [-0.3333333317213911, 0.13333303556865234, -0.053959259571154806, 0.02176891862014658]
_TANH += [-0.008343945444895428, 0.002292744755729167]
_ERF_SMALL = [0.12837916584835085, -0.37612626666719334, 0.11283594715149635, -0.026854212010218714]
_ERF_SMALL += [0.005189087422716351, -0.0008016864281274696, 7.875875044354481e-05]
_ERF_LARGE = [1.1287928136198706, 0.6346172552062269, 0.10702251445186614, -0.024332305511722566]
_ERF_LARGE += [0.003835511309633223, -0.00033168543960100574, -1.5843900902954068e-06, 3.236754779542835e-06]
_ERF_LARGE += [-2.1661805430598922e-07]
_LOG = [0.33333333281332256, -0.24999990004720546, 0.20000009556296416, -0.1666802983435987, 0.14286586433912338]
_LOG += [-0.12450043491713111, 0.11035912266132233, -0.10650434830187609, 0.10546194342524036, -0.0621060476458361]
_TAIL_SCALE = 0.305
_TAIL = [0.1216397354584201, 0.1224668204624704, 0.10342086494350969, 0.12102168886782672, -0.03797684674631807]
_TAIL += [0.18571691848232869, -0.1529883329913788, 0.036699198515723695]
_ROUNDER = 12582912.0  # 1.5 * 2**23: adding it rounds to an integer, which then sits in the low bits


def _or_library(polynomial: Callable[[Emitter, Expr], Expr]) -> Callable[[Emitter, Expr], Expr]:
    """Decorator: the library's function of that name for types and targets whose library is faster."""

    @functools.wraps(polynomial)
    def rule(e: Emitter, x: Expr) -> Expr:
        return e.libm(polynomial.__name__, x) if e.has_library(element_type(x)) else polynomial(e, e.bind(x))

    return rule


@_or_library
def exp(e: Emitter, x: Expr) -> Expr:
    """``exp(x) = 2**n * exp(r)``, ``n = round(x / ln 2)``, ``|r| <= ln(2) / 2``."""
    # Outside of this range the result is inf or rounds to zero; comparisons with nan are false, so nan passes through.
    x = e.bind(e.select(x > e.const(89.0, "float32"), e.const(89.0, "float32"), x))
    x = e.bind(e.select(x < e.const(-104.0, "float32"), e.const(-104.0, "float32"), x))
    p, whole = _reduced(e, x)
    p = e.bind(p + e.const(1.0, "float32"))
    # Two factors, because 2**n alone leaves the float range at both ends.
    half = e.bind(tirx.shift_right(whole, e.const(1, "int32")))
    return e.bind(p * _power_of_two(e, half) * _power_of_two(e, whole - half))


def _exp_within(e: Emitter, x: Expr) -> Expr:
    """``exp`` for ``|x| < 87`` or nan: no clamping, and one factor."""
    p, whole = _reduced(e, e.bind(x))
    return e.bind(e.bind(p + e.const(1.0, "float32")) * _power_of_two(e, whole))


def _reduced(e: Emitter, x: Expr) -> tuple[Expr, Expr]:
    """``exp(r) - 1`` and the integer ``n`` of ``x = n ln 2 + r``."""
    shifted = e.bind(e.fma(x, e.const(1 / math.log(2.0), "float32"), e.const(_ROUNDER, "float32")))
    n = e.bind(shifted - e.const(_ROUNDER, "float32"))
    r = e.bind(e.fma(n, e.const(-_LN2_HIGH, "float32"), x))
    r = e.bind(e.fma(n, e.const(-_LN2_LOW, "float32"), r))
    p = e.polynomial(r, _EXP)
    p = e.bind(e.fma(p, e.bind(r * r), r))
    return p, e.bind(e.reinterpret(shifted, "int32") - e.const(0x4B400000, "int32"))


@_or_library
def expm1(e: Emitter, x: Expr) -> Expr:
    """``2**n * (exp(r) - 1) + (2**n - 1)``, halved until the end because ``2**128`` is no number."""
    clamped = e.bind(e.select(x > e.const(89.0, "float32"), e.const(89.0, "float32"), x))
    # expm1(-20) rounds to -1
    clamped = e.bind(e.select(clamped < e.const(-20.0, "float32"), e.const(-20.0, "float32"), clamped))
    p, whole = _reduced(e, clamped)
    half = _power_of_two(e, whole - e.const(1, "int32"))
    scaled = e.bind(e.fma(p, half, half - e.const(0.5, "float32")))
    result = e.select(tirx.EQ(whole, e.const(0, "int32")), p, scaled + scaled)
    return e.bind(e.select(tirx.EQ(x, e.const(0.0, "float32")), x, result))


def _power_of_two(e: Emitter, n: Expr) -> Expr:
    bits = tirx.shift_left(n + e.const(127, "int32"), e.const(23, "int32"))
    return e.bind(e.reinterpret(bits, "float32"))


@_or_library
def log(e: Emitter, x: Expr) -> Expr:
    """``log(m * 2**n) = n ln 2 + log1p(m - 1)``, ``m`` between ``sqrt(1/2)`` and ``sqrt(2)``."""
    tiny = e.bind(x < e.const(1.1754943508222875e-38, "float32"))
    scaled = e.bind(e.select(tiny, x * e.const(2.0**23, "float32"), x))
    bits = e.bind(e.reinterpret(scaled, "int32"))
    # Bits counted from sqrt(1/2): the exponent field is then the octave of the number around 1.
    offset = e.bind(bits - e.const(0x3F3504F3, "int32"))
    octave = e.bind(tirx.shift_right(offset, e.const(23, "int32")))
    m = e.bind(e.reinterpret(bits - tirx.shift_left(octave, e.const(23, "int32")), "float32"))
    n = e.cast(octave, "float32") - e.select(tiny, e.const(23.0, "float32"), e.const(0.0, "float32"))
    n = e.bind(n)
    f = e.bind(m - e.const(1.0, "float32"))
    square = e.bind(f * f)
    p = e.polynomial(f, _LOG)
    tail = e.bind(e.fma(e.bind(p * f), square, e.bind(n * e.const(_LN2_LOW, "float32"))))
    tail = e.bind(e.fma(square, e.const(-0.5, "float32"), tail))
    result = e.bind(e.fma(n, e.const(_LN2_HIGH, "float32"), e.bind(f + tail)))
    inf = e.const(math.inf, "float32")
    result = e.bind(e.select(x < inf, result, x))  # inf and nan
    result = e.bind(e.select(x < e.const(0.0, "float32"), e.const(math.nan, "float32"), result))
    return e.bind(e.select(tirx.EQ(x, e.const(0.0, "float32")), e.const(-math.inf, "float32"), result))


def _sign_of(e: Emitter, magnitude: Expr, x: Expr) -> Expr:
    sign = tirx.bitwise_and(e.reinterpret(x, "int32"), e.const(-(2**31), "int32"))
    bits = tirx.bitwise_and(e.reinterpret(magnitude, "int32"), e.const(2**31 - 1, "int32"))
    return e.reinterpret(tirx.bitwise_or(bits, sign), "float32")


def _magnitude(e: Emitter, x: Expr) -> Expr:
    bits = tirx.bitwise_and(e.reinterpret(x, "int32"), e.const(2**31 - 1, "int32"))
    return e.bind(e.reinterpret(bits, "float32"))


@_or_library
def tanh(e: Emitter, x: Expr) -> Expr:
    """An odd polynomial below 0.625, ``1 - 2 / (exp(2|x|) + 1)`` above."""
    z = e.bind(x * x)
    small = e.fma(e.bind(e.polynomial(z, _TANH) * z), x, x)
    magnitude = _magnitude(e, x)
    one = e.const(1.0, "float32")
    ten = e.const(10.0, "float32")  # tanh(10) rounds to 1
    clamped = e.bind(e.select(magnitude > ten, ten, magnitude))
    large = e.bind(one - e.const(2.0, "float32") / (_exp_within(e, clamped + clamped) + one))
    result = e.bind(e.select(magnitude < e.const(0.625, "float32"), small, large))
    return e.bind(_sign_of(e, result, x))  # of zero too


@_or_library
def erf(e: Emitter, x: Expr) -> Expr:
    """An odd polynomial below 1, ``1 - exp(-|x| q(|x|))`` above."""
    small = e.fma(e.polynomial(e.bind(x * x), _ERF_SMALL), x, x)
    magnitude = _magnitude(e, x)
    four = e.const(4.0, "float32")  # erf(4) rounds to 1
    clamped = e.bind(e.select(magnitude > four, four, magnitude))
    q = e.polynomial(clamped, _ERF_LARGE)
    one = e.const(1.0, "float32")
    large = e.bind(one - _exp_within(e, e.const(-1.0, "float32") * (clamped * q)))
    result = e.bind(e.select(magnitude < one, small, large))
    return e.bind(_sign_of(e, result, x))


def sigmoid(e: Emitter, x: Expr) -> Expr:
    """``1 / (1 + exp(-x))``."""
    one = e.const(1.0, element_type(x))
    return e.bind(e.reciprocal(one + exp(e, e.const(-1.0, element_type(x)) * x)))


def gaussian(e: Emitter, x: Expr) -> Expr:
    """``exp(-x**2 / 2)`` for half types: for large ``x`` as exact as the square of ``x``."""
    x = e.bind(x)
    square = e.bind(x * x)
    if not e.is_quick:
        return exp(e, e.bind(e.const(-0.5, "float32") * square))
    return e.bind(e.quick("exp2", e.bind(square * e.const(-0.5 / math.log(2), "float32"))))


def normal_cdf(e: Emitter, x: Expr) -> Expr:
    """``(1 + erf(x / sqrt(2))) / 2`` for half types.

    Quick: ``exp(-x**2 / 2) * t * p(t)`` below zero and one minus that above, ``t = 1 / (1 + 0.305 |x|)``, ``p`` a
    polynomial of least relative error (Abramowitz and Stegun, 7.1.26, with more terms). Absolute error at most 2.1e-7;
    relative error below zero at most 4e-6, where ``1 + erf`` loses its digits.
    """
    x = e.bind(x)
    one = e.const(1.0, "float32")
    if not e.is_quick:
        return e.bind(e.const(0.5, "float32") * (one + erf(e, x * e.const(math.sqrt(0.5), "float32"))))
    t = e.bind(e.quick("reciprocal", e.fma(_magnitude(e, x), e.const(_TAIL_SCALE, "float32"), one)))
    tail = e.bind(e.bind(t * e.polynomial(t, _TAIL)) * gaussian(e, x))
    return e.bind(e.select(x < e.const(0.0, "float32"), tail, one - tail))


@_or_library
def log1p(e: Emitter, x: Expr) -> Expr:
    """``log(u) - ((u - 1) - x) / u`` with ``u = 1 + x`` rounded: the second term undoes the rounding."""
    one = e.const(1.0, "float32")
    u = e.bind(one + x)
    correction = e.bind(((u - one) - x) / u)
    result = e.bind(log(e, u) - correction)
    # At u == 0 and u == inf the correction is nan or inf, and the logarithm alone is the answer.
    plain = tirx.Or(tirx.EQ(u, e.const(0.0, "float32")), tirx.EQ(u, e.const(math.inf, "float32")))
    result = e.bind(e.select(plain, log(e, u), result))
    return e.bind(e.select(tirx.EQ(u, one), x, result))
