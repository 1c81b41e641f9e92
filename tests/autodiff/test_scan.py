"""Rolling up: steps that are proven to be a loop, steps that stay; values and gradients are unchanged."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch.testing import assert_close
from tvm import relax
from tvm.relax import op

from autodiff.ir import bindings, op_name
from autodiff.scan import hoist, is_scan, roll_up, scan_of, turned_inside, unroll
from bridge.reference import interpret
from tests.autodiff.evaluate import function
from tests.autodiff.gradcheck import draw

STEPS = 6


def part(scope, x, index, axis=0, extent=1):
    """A slice along an axis, without it where it has one element."""
    value = scope.emit(op.strided_slice(x, [axis], [index * extent], [(index + 1) * extent], [1]))
    return scope.emit(op.squeeze(value, [axis])) if extent == 1 else value


def joined(scope, parts, axis=0):
    return scope.emit(op.concat(relax.Tuple(parts), axis))


def cell(scope, h, x, w):
    return scope.emit(op.tanh(scope.emit(op.add(scope.emit(op.matmul(h, w)), x))))


def forward(scope, h, x, w):
    ys = []
    for index in range(STEPS):
        h = cell(scope, h, part(scope, x, index), w)
        ys.append(h)
    return [h, joined(scope, ys)]


def backward(scope, h, x, w):
    """From the last part to the first; results in the order of the parts."""
    ys = []
    for index in reversed(range(STEPS)):
        h = cell(scope, h, part(scope, x, index), w)
        ys.append(h)
    return [joined(scope, ys[::-1]), joined(scope, ys)]


def parts_before(scope, h, x, w):
    """All parts are there before the loop; some results are read one by one."""
    parts, ys = [part(scope, x, index) for index in range(STEPS)], []
    for each in parts:
        h = cell(scope, h, each, w)
        ys.append(h)
    return [scope.emit(op.add(ys[1], ys[4])), joined(scope, ys[2:5]), ys[0]]


def looks_back(scope, h, x, w):
    """A step reads the states of the two steps before it."""
    before = h
    for index in range(STEPS):
        h, before = cell(scope, scope.emit(op.multiply(h, before)), part(scope, x, index), w), h
    return [h, before]


def of_middle_axis(scope, h, x, w):
    """Parts of the second axis, two rows each; results are joined along it."""
    x = scope.emit(op.permute_dims(scope.emit(op.reshape(x, (STEPS, 2, 3))), [1, 0, 2]))
    x = scope.emit(op.reshape(scope.emit(op.concat(relax.Tuple([x, x]), 1)), (2, 2 * STEPS, 3)))
    ys, state = [], scope.emit(op.expand_dims(h, 1))
    state = scope.emit(op.concat(relax.Tuple([state, state]), 1))
    for index in range(STEPS):
        state = cell(scope, state, part(scope, x, index, 1, 2), w)
        ys.append(state)
    return [joined(scope, ys, 1)]


def other_steps_first(scope, h, x, w):
    """The first and the last step differ from the others."""
    h = scope.emit(op.multiply(cell(scope, h, part(scope, x, 0), w), h))
    for index in range(1, STEPS):
        h = cell(scope, h, part(scope, x, index), w)
    return [scope.emit(op.exp(h))]


def inputs_products(scope, h, x, w):
    """A product of the parts, which depends on no step."""
    for index in range(STEPS):
        h = cell(scope, h, scope.emit(op.matmul(part(scope, x, index), w)), w)
    return [h]


def inputs_products_and_bias(scope, h, x, w):
    """As ``inputs_products``, with a bias, the first row of the weight."""
    bias = part(scope, w, 0)
    for index in range(STEPS):
        product = scope.emit(op.matmul(part(scope, x, index), w))
        h = cell(scope, h, scope.emit(op.add(product, bias)), w)
    return [h]


def two_loops(scope, h, x, w):
    first, last = h, h
    ys = []
    for index in range(STEPS):
        first = cell(scope, first, part(scope, x, index), w)
        ys.append(first)
    for y in ys:
        last = scope.emit(op.sin(scope.emit(op.add(last, y))))
    return [last]


def constants_parts(scope, h, x, w):
    """A part of a constant and an item of its pieces stand before the loop, and are none of its."""
    whole = relax.const(np.arange(12.0).reshape(3, 4), "float64")
    pieces = scope.emit(op.split(relax.const(np.ones((2, 6)), "float64"), 2, axis=1))
    h = scope.emit(op.add(h, part(scope, whole, 1, axis=1)))
    h = scope.emit(op.add(h, scope.emit(relax.TupleGetItem(pieces, 1))))
    return forward(scope, h, x, w)


def reshaped_twice(scope, h, x, w):
    """A step's result is reshaped in the loop, and again after it, as Jamba's state-space layers do."""
    ys = []
    for index in range(STEPS):
        h = cell(scope, h, part(scope, x, index), w)
        ys.append(scope.emit(op.reshape(scope.emit(op.sin(h)), [6])))
    return [joined(scope, [scope.emit(op.reshape(each, [3, 2])) for each in ys])]


LOOPS = {
    each.__name__: (each, scans)
    for each, scans in (
        *((forward, 1), (backward, 1), (parts_before, 1), (looks_back, 1), (of_middle_axis, 1)),
        *((other_steps_first, 1), (inputs_products, 1), (inputs_products_and_bias, 1), (two_loops, 2)),
        *((constants_parts, 1), (reshaped_twice, 1)),
    )
}


def scans_of(func):
    return [scan_of(value)[0] for _, value in bindings(func) if is_scan(value)]


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_is_rolled_up_and_computes_the_same(name):
    build, scans = LOOPS[name]
    args = draw(2, 3), draw(STEPS, 2, 3, seed=1), draw(3, 3, seed=2)
    func = function(build, *args)
    rolled = roll_up(func)
    found = scans_of(rolled)
    assert len(found) == scans and all(scan.length >= STEPS - 1 for scan in found)
    wanted = interpret(func, args).results
    assert_close(interpret(rolled, args).results, wanted, rtol=1e-13, atol=1e-13)
    again = unroll(rolled)
    assert not scans_of(again) and unroll(again) is again
    assert_close(interpret(again, args).results, wanted, rtol=1e-13, atol=1e-13)


def test_joined_results_are_read_as_the_scan_makes_them():
    args = draw(2, 3), draw(STEPS, 2, 3, seed=1), draw(3, 3, seed=2)
    rolled = roll_up(function(forward, *args))
    assert sum(1 for _ in bindings(rolled)) < 2 * STEPS
    assert not {"relax.concat", "relax.strided_slice"} & {op_name(value) for _, value in bindings(rolled)}


def test_what_depends_on_no_carry_is_computed_before_the_loop():
    args = draw(2, 3), draw(STEPS, 2, 3, seed=1), draw(3, 3, seed=2)
    rolled = hoist(roll_up(function(inputs_products, *args)))
    products = [value for _, value in bindings(rolled) if op_name(value) == "relax.matmul"]
    assert [[int(n) for n in value.ty.shape] for value in products] == [[STEPS * 2, 3]]
    (scan,) = scans_of(rolled)
    assert [op_name(value) for _, value in bindings(scan.function)].count("relax.matmul") == 1


def test_a_bias_is_added_in_the_steps():
    args = draw(2, 3), draw(STEPS, 2, 3, seed=1), draw(3, 3, seed=2)
    func = function(inputs_products_and_bias, *args)
    rolled = hoist(roll_up(func))
    outside = [op_name(value) for _, value in bindings(rolled)]
    assert outside.count("relax.matmul") == 1 and "relax.add" not in outside
    wanted = interpret(func, args).results
    assert_close(interpret(rolled, args).results, wanted, rtol=1e-13, atol=1e-13)


def test_transposed_constants_are_turned_inside():
    def build(scope, h, x, w):
        turned = scope.emit(op.permute_dims(w))
        for index in range(STEPS):
            h = cell(scope, h, part(scope, x, index), turned)
        return [h]

    args = draw(2, 3), draw(STEPS, 2, 3, seed=1), draw(3, 3, seed=2)
    rolled = roll_up(function(build, *args))
    turned = turned_inside(rolled)
    (call,) = [value for _, value in bindings(turned) if is_scan(value)]
    assert scan_of(call)[1][-1] == turned.params[-1] and turned_inside(turned) is turned
    wanted = interpret(rolled, args).results
    assert_close(interpret(turned, args).results, wanted, rtol=1e-13, atol=1e-13)


def test_a_body_is_the_same_whatever_the_length():
    def scan(count):
        def build(scope, h, x, w):
            for index in range(count):
                h = cell(scope, h, part(scope, x, index), w)
            return [h]

        return scans_of(roll_up(function(build, draw(2, 3), draw(count, 2, 3), draw(3, 3))))[0]

    short, long = scan(5), scan(9)
    assert (short.length, long.length) == (5, 9) and short.body == long.body


def other_numbers(scope, h, x, w):
    for index in range(STEPS):
        h = scope.emit(op.multiply(cell(scope, h, x, w), relax.const(float(index), "float64")))
    return [h]


def other_weights(scope, h, x, *weights):
    for w in weights:
        h = cell(scope, h, x, w)
    return [h]


def skipped_part(scope, h, x, w):
    for index in (0, 1, 2, 4, 3, 5):
        h = cell(scope, h, part(scope, x, index), w)
    return [h]


def independent(scope, h, x, w):
    return [joined(scope, [cell(scope, h, part(scope, x, index), w) for index in range(STEPS)])]


def far_back(scope, h, x, w, steps=7):
    """A step reads the state of the fifth step before it."""
    made = [h] * 5
    for _ in range(steps):
        made.append(cell(scope, made[-5], x, w))
    return [made[-1]]


def test_steps_that_look_far_back_are_a_loop_two_by_two():
    args = draw(2, 3), draw(2, 3, seed=1), draw(3, 3, seed=2)
    func = function(partial(far_back, steps=10), *args)
    rolled = roll_up(func)
    assert [scan.length for scan in scans_of(rolled)] == [5]
    assert_close(interpret(rolled, args).results, interpret(func, args).results, rtol=1e-13, atol=1e-13)


def first_step_again(scope, h, x, w):
    """Every step reads the first step's state."""
    first = cell(scope, h, x, w)
    h = first
    for _ in range(STEPS):
        h = cell(scope, scope.emit(op.add(h, first)), x, w)
    return [h]


def few(scope, h, x, w):
    for _ in range(3):
        h = cell(scope, h, x, w)
    return [h]


@pytest.mark.parametrize("build", [other_numbers, skipped_part, independent, far_back, few])
def test_what_is_no_loop_stays(build):
    state, parts = draw(2, 3), draw(STEPS, 2, 3, seed=1)
    sliced = build in (skipped_part, independent)
    func = function(build, state, parts if sliced else parts[0], draw(3, 3, seed=2))
    assert roll_up(func) is func


def test_weights_of_their_own_are_not_copied_together():
    func = function(other_weights, draw(2, 3), draw(2, 3), *(draw(3, 3, seed=seed) for seed in range(STEPS)))
    assert roll_up(func) is func


def test_a_loop_may_read_what_a_step_before_it_made():
    args = draw(2, 3), draw(2, 3, seed=1), draw(3, 3, seed=2)
    func = function(first_step_again, *args)
    rolled = roll_up(func)
    assert [scan.length for scan in scans_of(rolled)] == [STEPS]
    assert_close(interpret(rolled, args).results, interpret(func, args).results, rtol=1e-13, atol=1e-13)


def test_numbers_that_json_lacks_survive():
    def build(scope, h):
        for _ in range(STEPS):
            h = scope.emit(op.maximum(scope.emit(op.sin(h)), relax.const(float("-inf"), "float64")))
        return [h]

    args = (draw(2, 3),)
    rolled = roll_up(function(build, *args))
    assert len(scans_of(rolled)) == 1
    assert torch.equal(interpret(rolled, args).results[0], interpret(function(build, *args), args).results[0])
