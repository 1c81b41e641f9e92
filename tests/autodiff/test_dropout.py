"""Dropout becomes a multiplication by a mask parameter."""

from __future__ import annotations

import itertools

import pytest
import torch
from tvm.relax import TupleGetItem, op

from autodiff import clean, mask_dropout
from autodiff.dropout import keep_scale
from autodiff.ir import dtype, shape
from tests.autodiff.evaluate import evaluate, function
from tests.autodiff.gradcheck import draw
from tests.sampling import sampled


@pytest.mark.parametrize(
    ("rate", "element_type"),
    sampled(
        itertools.product((0.1, 0.3, 0.9), (torch.float32, torch.float64, torch.float16, torch.bfloat16)),
        lambda case: case[0] == 0.3,
    ),
    ids=str,
)
def test_equals_torch_bit_for_bit(rate, element_type):
    x, name = draw(64).to(element_type), str(element_type).removeprefix("torch.")
    func = mask_dropout(function(lambda s, p: TupleGetItem(s.emit(op.nn.dropout(p, rate)), 0), x))
    torch.manual_seed(0)
    wanted = torch.dropout(x, rate, True)
    torch.manual_seed(0)
    mask = torch.empty(64, dtype=torch.bool).bernoulli_(1 - rate)
    assert torch.equal(evaluate(func, x, mask)[0], wanted)
    noise = torch.ones((), dtype=element_type).div_(1 - rate)
    assert torch.tensor(keep_scale(rate, name), dtype=torch.float64).to(element_type) == noise


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_nothing_is_drawn_for_rates_zero_and_one(rate):
    x = draw(2, 3)

    def build(scope, p):
        pair = scope.emit(op.nn.dropout(p, rate))
        return [op.negative(scope.emit(TupleGetItem(pair, 0))), TupleGetItem(pair, 1)]

    func = clean(mask_dropout(function(build, x)))
    assert len(func.params) == 1
    got, mask = evaluate(func, x)
    assert torch.equal(got, -x if rate == 0.0 else -torch.zeros_like(x))
    assert torch.equal(mask, torch.full_like(x, rate == 0.0))


def test_the_mask_result_is_the_mask_in_the_operators_type():
    """Another operator reads it in that type, as a gradient of a gradient does."""
    x, mask = draw(3), torch.tensor([True, False, True])

    def build(scope, p):
        return op.multiply(scope.emit(TupleGetItem(scope.emit(op.nn.dropout(p, 0.5)), 1)), p)

    func = mask_dropout(function(build, x))
    assert (shape(func.params[1]), dtype(func.params[1])) == ((3,), "bool")
    assert torch.equal(evaluate(func, x, mask)[0], mask * x)


def test_wrong_rates_and_taken_names_are_refused():
    def drop(rate):
        return lambda s, p: TupleGetItem(s.emit(op.nn.dropout(p, rate)), 0)

    with pytest.raises(ValueError, match=r"rate between 0 and 1, got 1\.5"):
        mask_dropout(function(drop(1.5), draw(3)))
    with pytest.raises(ValueError, match="'mask_0'"):
        mask_dropout(function(drop(0.5), draw(3), names=["mask_0"]))
