"""Grad_outs that are absent: nothing is computed from them, and nothing that others are computed from is lost."""

from __future__ import annotations

import math

import pytest
import torch
from tvm.relax import const, op

from autodiff import without_grad_outs
from autodiff.ir import bindings, op_name, results
from tests.autodiff.evaluate import evaluate, function
from tests.autodiff.gradcheck import draw

#: gradients from a grad_out that is there (4, 6), one that is not, and a saved tensor; all of one shape
LINEAR = {
    "a sum": lambda s, there, absent, x: op.add(there, absent),
    "a sum, the other way": lambda s, there, absent, x: op.add(absent, there),
    "a difference": lambda s, there, absent, x: op.subtract(there, absent),
    "a product": lambda s, there, absent, x: op.add(there, s.emit(op.multiply(x, absent))),
    "a quotient": lambda s, there, absent, x: op.add(there, s.emit(op.divide(absent, x))),
    "a matrix product": lambda s, there, absent, x: op.add(
        there, s.emit(op.matmul(s.emit(op.matmul(absent, s.emit(op.permute_dims(x)))), x))
    ),
    "views": lambda s, there, absent, x: op.add(
        s.emit(op.reshape(s.emit(op.permute_dims(s.emit(op.negative(absent)))), (4, 6))), there
    ),
    "a sum of columns": lambda s, there, absent, x: op.add(
        there, s.emit(op.broadcast_to(s.emit(op.sum(absent, [0], keepdims=True)), (4, 6)))
    ),
    "a part": lambda s, there, absent, x: op.add(
        there, s.emit(op.broadcast_to(s.emit(op.strided_slice(absent, [0], [1], [2])), (4, 6)))
    ),
    "a term of terms": lambda s, there, absent, x: op.multiply(
        x, s.emit(op.add(s.emit(op.add(absent, s.emit(op.multiply(absent, x)))), there))
    ),
    "the part that was chosen": lambda s, there, absent, x: op.add(
        there, s.emit(op.where(s.emit(op.greater(x, there)), absent, const(0.0, "float64")))
    ),
    "the part that was not": lambda s, there, absent, x: op.add(
        there, s.emit(op.where(s.emit(op.greater(x, there)), s.emit(op.zeros((4, 6), "float64")), absent))
    ),
    "casts": lambda s, there, absent, x: op.add(
        there, s.emit(op.astype(s.emit(op.astype(absent, "float32")), "float64"))
    ),
}


@pytest.mark.parametrize("build", LINEAR.values(), ids=LINEAR)
def test_what_is_left_is_what_zeros_would_give(build):
    there, absent, x = draw(4, 6), draw(4, 6), draw(4, 6)
    func = function(build, there, absent, x)
    narrowed = without_grad_outs(func, [1], [0])
    assert [param.name for param in narrowed.params] == ["p0", "p2"]
    (found,), (wanted,) = evaluate(narrowed, there, x), evaluate(func, there, torch.zeros_like(absent), x)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert len(list(bindings(narrowed))) < len(list(bindings(func)))


def test_infinities_do_not_meet_a_gradient_that_is_absent():
    """As in eager: a logarithm at 0 with an unused result passes no gradient on."""
    there, absent, x = draw(3), draw(3), torch.tensor([0.0, 1.0, math.inf], dtype=torch.float64)
    func = function(lambda s, there, absent, x: op.add(there, s.emit(op.divide(absent, x))), there, absent, x)
    assert torch.equal(evaluate(without_grad_outs(func, [1], [0]), there, x)[0], there)


def test_a_view_there_and_back_around_a_term_that_is_gone_disappears():
    def build(s, there, absent):
        wide = s.emit(op.add(s.emit(op.reshape(there, (2, 12))), absent))
        return op.exp(s.emit(op.reshape(wide, (4, 6))))

    narrowed = without_grad_outs(function(build, draw(4, 6), draw(2, 12)), [1], [0])
    assert [op_name(value) for _, value in bindings(narrowed)] == ["relax.exp"]


def test_several_results_and_grad_outs():
    def build(s, first, second, third, x):
        shared = s.emit(op.add(s.emit(op.add(first, second)), third))
        return [op.multiply(shared, x), op.negative(second), op.add(x, shared), op.negative(first)]

    args = [draw(3, 5) for _ in range(4)]
    func = function(build, *args)
    narrowed = without_grad_outs(func, [1, 2], [3, 2, 0])
    wanted = evaluate(func, args[0], torch.zeros(3, 5).double(), torch.zeros(3, 5).double(), args[3])
    found = evaluate(narrowed, args[0], args[3])
    assert len(results(narrowed)) == 3 and all(map(torch.equal, found, [wanted[3], wanted[2], wanted[0]]))
    assert without_grad_outs(func, [1], [0, 1]) is None, "a result that is computed from nothing else"


#: expressions that another formula computes, or that have no rule
REFUSED = {
    "what is taken from nothing": lambda s, there, absent: op.subtract(absent, there),
    "a divisor": lambda s, there, absent: op.divide(there, absent),
    "a choice": lambda s, there, absent: op.where(s.emit(op.greater(there, there)), there, absent),
    "a sum that has the shape of the term": lambda s, there, absent: op.add(s.emit(op.sum(there)), absent),
    "a function that is not linear": lambda s, there, absent: op.add(there, s.emit(op.exp(absent))),
}


@pytest.mark.parametrize("build", REFUSED.values(), ids=REFUSED)
def test_what_there_is_no_rule_for_is_not_guessed(build):
    assert without_grad_outs(function(build, draw(2, 3), draw(2, 3)), [1], [0]) is None
