"""ZappLike, ZeroZapp, OneZapp: before and after, and expressions that must stay."""

from __future__ import annotations

import pytest
import torch
from tvm import relax
from tvm.relax import op

from autodiff import clean, one_zapp, zapp_like, zero_zapp
from autodiff.ir import bindings, op_name, shape
from tests.autodiff.evaluate import evaluate, function
from tests.autodiff.gradcheck import draw


@pytest.mark.parametrize(
    "source,target", [((2, 3, 4), (3, 1)), ((2, 3, 4), ()), ((1, 2, 1), (1, 1)), ((1, 3), (3,))], ids=str
)
def test_collapse_sum_has_the_same_value(source, target):
    x = draw(*source)
    func = function(lambda s, p: op.collapse_sum_to(p, target), x)
    after = zapp_like(func)
    assert "relax.collapse_sum_to" not in [op_name(value) for _, value in bindings(after)]
    torch.testing.assert_close(evaluate(after, x)[0], x.sum_to_size(target), rtol=1e-12, atol=1e-12)


def test_half_types_are_summed_in_float32():
    x = torch.full((4096,), 1.0).bfloat16()  # a bfloat16 accumulator stops at 256
    after = zapp_like(function(lambda s, p: op.collapse_sum_to(p, ()), x))
    assert evaluate(after, x)[0] == 4096


def _constant(value, extents, dtype="float64"):
    return op.full(extents, relax.const(value, dtype), dtype)


NEUTRAL = {
    "x + 0": (zero_zapp, lambda s, x: op.add(x, s.emit(op.zeros((2, 3), "float64")))),
    "0 + x": (zero_zapp, lambda s, x: op.add(s.emit(op.zeros((2, 3), "float64")), x)),
    "x + scalar 0": (zero_zapp, lambda s, x: op.add(x, relax.const(0, "float64"))),
    "x - 0": (zero_zapp, lambda s, x: op.subtract(x, s.emit(op.zeros((3,), "float64")))),
    "x + broadcast 0": (zero_zapp, lambda s, x: op.add(x, s.emit(op.broadcast_to(relax.const(0, "float64"), (2, 3))))),
    "x * 1": (one_zapp, lambda s, x: op.multiply(x, s.emit(op.ones((2, 3), "float64")))),
    "1 * x": (one_zapp, lambda s, x: op.multiply(relax.const(1, "float64"), x)),
    "x * full 1": (one_zapp, lambda s, x: op.multiply(x, s.emit(_constant(1, (1, 3))))),
    "x / 1": (one_zapp, lambda s, x: op.divide(x, s.emit(op.ones((3,), "float64")))),
}


@pytest.mark.parametrize("name", NEUTRAL)
def test_neutral_elements_disappear(name):
    zapp, build = NEUTRAL[name]
    after = zapp(function(build, draw(2, 3)))
    assert not list(bindings(after))
    assert after.body.body.fields[0].same_as(after.params[0])


def test_neutral_elements_that_give_the_shape_become_a_broadcast():
    for zapp, build in [
        (zero_zapp, lambda s, x: op.add(x, s.emit(op.zeros((2, 3), "float64")))),
        (one_zapp, lambda s, x: op.multiply(s.emit(op.ones((2, 3), "float64")), x)),
    ]:
        after = zapp(function(build, draw(3)))
        ((_, value),) = bindings(after)
        assert op_name(value) == "relax.broadcast_to" and shape(value) == (2, 3)


LEFT_ALONE = {
    "x * 0": lambda s, x: op.multiply(x, relax.const(0, "float64")),
    "0 - x": lambda s, x: op.subtract(relax.const(0, "float64"), x),
    "1 / x": lambda s, x: op.divide(relax.const(1, "float64"), x),
    "x + 1": lambda s, x: op.add(x, relax.const(1, "float64")),
    "x + y": lambda s, x: op.add(x, x),
    "x * [1, 1, 2]": lambda s, x: op.multiply(x, relax.const([1.0, 1.0, 2.0], "float64")),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_left_alone(name):
    func = function(LEFT_ALONE[name], draw(2, 3))
    assert zero_zapp(func) is func
    assert one_zapp(func) is func


def test_a_product_with_zeros_stays_a_product():
    """inf * 0 is NaN. (Not evaluated here: TVM's own simplifier of loop bodies makes 0 of it later.)"""
    func = function(lambda s, x: op.multiply(x, s.emit(op.zeros((2,), "float64"))), draw(2))
    assert "relax.multiply" in [op_name(value) for _, value in bindings(clean(func))]
