"""Scans: a step between marks, hoisting, transposed constants and unrolling give the results of the steps."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close
from tvm import relax
from tvm.relax import op

from autodiff import library
from autodiff.ir import bindings, op_name
from autodiff.scan import from_marks, hoist, is_scan, scan_of, turned_inside, unroll
from bridge.reference import interpret
from tests.autodiff.evaluate import function
from tests.autodiff.gradcheck import draw

STEPS = 6


def mark(scope, name, value, *numbers, ty=None):
    numbers = [relax.prim_value(number) for number in numbers]
    return scope.emit(library.call(f"loop_{name}", [value, *numbers], ty or value.ty))


def looped(step, reverse=False, steps=STEPS):
    """A function of one step between marks: a state, its parts, and a constant; returns the last state and all."""

    def build(scope, h, x, w):
        part = mark(scope, "part", x, 0, 0, ty=relax.TensorType((2, 3), "float64"))
        state = mark(scope, "first", h, 0, 0, steps, int(reverse))
        after = step(scope, state, part, w)
        last = mark(scope, "last", after, 0, 0)
        return [last, mark(scope, "steps", after, 0, 0, steps, ty=relax.TensorType((steps, 2, 3), "float64"))]

    return build


def cell(scope, h, x, w):
    return scope.emit(op.tanh(scope.emit(op.add(scope.emit(op.matmul(h, w)), x))))


def of_products(scope, h, x, w):
    """A product of the part, which depends on no step."""
    return cell(scope, h, scope.emit(op.matmul(x, w)), w)


def of_products_and_bias(scope, h, x, w):
    bias = scope.emit(op.squeeze(scope.emit(op.strided_slice(w, [0], [0], [1], [1])), [0]))
    return cell(scope, h, scope.emit(op.add(scope.emit(op.matmul(x, w)), bias)), w)


def of_a_transposed_weight(scope, h, x, w):
    return cell(scope, h, x, scope.emit(op.permute_dims(w)))


def of_infinity(scope, h, x, w):
    """A number that JSON lacks."""
    return scope.emit(op.maximum(cell(scope, h, x, w), relax.const(float("-inf"), "float64")))


def arguments(steps=STEPS):
    return draw(2, 3), draw(steps, 2, 3, seed=1), draw(3, 3, seed=2)


def scanned(step, reverse=False, steps=STEPS):
    return from_marks(function(looped(step, reverse, steps), *arguments(steps)))


def scans_of(func):
    return [scan_of(value)[0] for _, value in bindings(func) if is_scan(value)]


def step_by_step(step, reverse=False):
    """The results, without a loop."""

    def build(scope, h, x, w):
        ys = {}
        for index in reversed(range(STEPS)) if reverse else range(STEPS):
            part = scope.emit(op.strided_slice(x, [0], [index], [index + 1], [1]))
            ys[index] = h = step(scope, h, scope.emit(op.squeeze(part, [0])), w)
        rows = [scope.emit(op.expand_dims(ys[index], 0)) for index in range(STEPS)]
        return [h, scope.emit(op.concat(relax.Tuple(rows), 0))]

    return interpret(function(build, *arguments()), arguments()).results


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("step", [cell, of_products, of_products_and_bias, of_a_transposed_weight, of_infinity])
def test_a_scan_computes_its_steps(step, reverse):
    func, wanted = scanned(step, reverse), step_by_step(step, reverse)
    (scan,) = scans_of(func)
    assert (scan.length, scan.carries, scan.xs) == (STEPS, 1, 1)
    again = unroll(func)
    assert not scans_of(again) and unroll(again) is again
    for made in (func, hoist(func), turned_inside(hoist(func)), again):
        assert_close(interpret(made, arguments()).results, wanted, rtol=1e-13, atol=1e-13)


def test_what_depends_on_no_carry_is_computed_before_the_loop():
    func = hoist(scanned(of_products))
    products = [value for _, value in bindings(func) if op_name(value) == "relax.matmul"]
    assert [[int(n) for n in value.ty.shape] for value in products] == [[STEPS * 2, 3]]
    (scan,) = scans_of(func)
    assert [op_name(value) for _, value in bindings(scan.function)].count("relax.matmul") == 1


def test_a_bias_is_added_in_the_steps():
    outside = [op_name(value) for _, value in bindings(hoist(scanned(of_products_and_bias)))]
    assert outside.count("relax.matmul") == 1 and "relax.add" not in outside


def test_transposed_constants_are_turned_inside():
    outside = hoist(scanned(of_a_transposed_weight))
    assert "relax.permute_dims" in [op_name(value) for _, value in bindings(outside)]
    turned = turned_inside(outside)
    (call,) = [value for _, value in bindings(turned) if is_scan(value)]
    assert scan_of(call)[1][-1] == turned.params[-1] and turned_inside(turned) is turned


def test_a_body_is_the_same_whatever_the_length():
    (short,), (long,) = (scans_of(scanned(cell, steps=steps)) for steps in (5, 9))
    assert (short.length, long.length) == (5, 9) and short.body == long.body


def test_numbers_that_json_lacks_survive():
    made = interpret(scanned(of_infinity), arguments()).results[0]
    assert torch.equal(made, step_by_step(of_infinity)[0])


def test_a_function_without_marks_is_the_same_object():
    func = function(lambda scope, h, x, w: [cell(scope, h, h, w)], *arguments())
    assert from_marks(func) is func


def without_last(scope, h, x, w):
    state = mark(scope, "first", h, 0, 0, STEPS, 0)
    return [mark(scope, "steps", cell(scope, state, h, w), 0, 0, STEPS, ty=relax.TensorType((STEPS, 2, 3), "float64"))]


def with_a_step_as_result(scope, h, x, w):
    state = mark(scope, "first", h, 0, 0, STEPS, 0)
    after = cell(scope, state, h, w)
    return [mark(scope, "last", after, 0, 0), after]


@pytest.mark.parametrize(
    ("build", "reason"), [(without_last, "marks of a loop are missing"), (with_a_step_as_result, "is a result")]
)
def test_marks_that_make_no_loop_are_refused(build, reason):
    with pytest.raises(ValueError, match=reason):
        from_marks(function(build, *arguments()))
