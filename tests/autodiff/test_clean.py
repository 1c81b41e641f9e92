"""Views, common subexpressions, dead code, and cleaning to a fixed point."""

from __future__ import annotations

import pytest
import torch
from tvm import relax
from tvm.relax import TupleGetItem, op

from autodiff import clean, common_subexpression_elimination, deduplicate_views
from autodiff.ir import bindings, op_name, results, shape
from tests.autodiff.evaluate import evaluate, function
from tests.autodiff.gradcheck import draw


def _ops(func):
    return [op_name(value) for _, value in bindings(func)]


IDENTITIES = {
    "reshape": lambda s, x: op.reshape(x, (2, 3)),
    "permute": lambda s, x: op.permute_dims(x, [0, 1]),
    "broadcast": lambda s, x: op.broadcast_to(x, (2, 3)),
    "cast": lambda s, x: op.astype(x, "float64"),
    "expand and squeeze": lambda s, x: op.squeeze(s.emit(op.expand_dims(x, [0])), [0]),
    "negative twice": lambda s, x: op.negative(s.emit(op.negative(x))),
    "transposed twice": lambda s, x: op.permute_dims(s.emit(op.permute_dims(x))),
}


@pytest.mark.parametrize("name", IDENTITIES)
def test_identities_disappear(name):
    func = clean(function(IDENTITIES[name], draw(2, 3)))
    assert not list(bindings(func))


def test_casts_disappear_only_if_they_lose_nothing():
    def there_and_back(wide):
        return lambda s, x: op.astype(s.emit(op.astype(x, wide)), str(x.ty.dtype))

    half = draw(3).bfloat16()
    assert not _ops(clean(function(there_and_back("float32"), half)))
    assert len(_ops(clean(function(there_and_back("float16"), half)))) == 2
    assert len(_ops(clean(function(there_and_back("bfloat16"), draw(3).float())))) == 2
    assert len(_ops(clean(function(there_and_back("int32"), draw(3).float())))) == 2
    assert len(_ops(clean(function(there_and_back("bool"), torch.tensor([2, 3]))))) == 2


def test_a_transpose_of_size_one_dims_is_a_reshape():
    func = deduplicate_views(function(lambda s, x: op.permute_dims(x, [1, 0, 2]), draw(1, 3, 4)))
    assert _ops(func) == ["relax.reshape"]
    func = function(lambda s, x: op.permute_dims(x, [0, 2, 1]), draw(1, 3, 4))
    assert deduplicate_views(func) is func


def test_broadcasts_move_into_their_users():
    def build(scope, x, y):
        wide = scope.emit(op.broadcast_to(y, (2, 3)), "wide")
        return [op.multiply(x, wide), op.add(wide, x), wide]

    func = clean(function(build, draw(2, 3), draw(3, seed=1)))
    values = dict(bindings(func))
    assert [shape(arg) for arg in values[results(func)[0]].args] == [(2, 3), (3,)]
    assert [shape(arg) for arg in values[results(func)[1]].args] == [(3,), (2, 3)]
    assert results(func)[2].name == "wide"  # the result still has the wide shape


def test_broadcasts_that_give_the_shape_stay():
    def build(scope, x, y):
        return op.multiply(scope.emit(op.broadcast_to(x, (2, 3))), y)

    func = function(build, draw(3), draw(3, seed=1))
    got = clean(func)
    assert shape(results(got)[0]) == (2, 3)
    # the product is computed before it is broadcast
    assert _ops(got) in (["relax.multiply", "relax.broadcast_to"], ["relax.broadcast_to", "relax.multiply"])
    torch.testing.assert_close(
        evaluate(got, draw(3), draw(3, seed=1))[0], (draw(3) * draw(3, seed=1)).expand(2, 3), rtol=0, atol=0
    )


def test_element_wise_work_on_broadcast_operands_is_done_before():
    def build(scope, row, x):
        wide = scope.emit(op.broadcast_to(row, (2, 3)))
        return op.add(x, scope.emit(op.multiply(wide, relax.const(2, "float64"))))

    func = clean(function(build, draw(2, 1), draw(2, 3)))
    assert [shape(value) for _, value in bindings(func)] == [(2, 1), (2, 3)]


def test_constants_of_one_number_become_scalars_in_their_users():
    def build(scope, x):
        zeros = scope.emit(op.reshape(scope.emit(op.broadcast_to(relax.const(0.0, "float64"), (6,))), (2, 3)))
        return op.where(scope.emit(op.greater(x, zeros)), x, zeros)

    func = clean(function(build, draw(2, 3)))
    assert _ops(func) == ["relax.greater", "relax.where"]
    assert shape(dict(bindings(func))[results(func)[0]].args[2]) == ()


def test_casts_to_fewer_bits_are_not_merged_before_differentiating():
    def build(scope, x):
        low, again = (scope.emit(op.astype(x, "float32")) for _ in range(2))
        wide, once_more = (scope.emit(op.astype(low, "float64")) for _ in range(2))
        return [low, again, wide, once_more]

    func = common_subexpression_elimination(function(build, draw(2)), merge_casts=False)
    assert _ops(func) == ["relax.astype"] * 3
    assert _ops(clean(func, merge_casts=False)) == ["relax.astype"] * 3
    assert _ops(clean(func)) == ["relax.astype"] * 2


def test_common_subexpressions_differ_in_attributes_constants_and_library_functions():
    from autodiff import library

    def build(scope, x):
        half, third = relax.const(0.5, "float64"), relax.const(1 / 3, "float64")
        calls = [library.call(name, [x, relax.prim_value(k)], x.ty) for name in ("f", "g") for k in (0, 1)]
        calls += [op.multiply(x, half), op.multiply(x, third), op.sum(x, [0]), op.sum(x, [1])]
        return [scope.emit(call) for call in calls]

    func = function(build, draw(2, 2))
    assert common_subexpression_elimination(func) is func


def test_constants_compare_by_value():
    def build(scope, x):
        return [op.multiply(x, relax.const(0.5, "float64")), op.multiply(x, relax.const(0.5, "float64"))]

    func = common_subexpression_elimination(function(build, draw(2)))
    assert len(list(bindings(func))) == 1


def test_tuples_are_seen_through():
    def build(scope, x, y):
        pair = scope.emit(relax.Tuple([x, scope.emit(op.exp(y), "e")]))
        return [op.sin(scope.emit(TupleGetItem(pair, 0))), TupleGetItem(pair, 1)]

    func = clean(function(build, draw(2), draw(2)))
    assert _ops(func) == ["relax.exp", "relax.sin"]
    assert results(func)[1].name == "e"


def test_cleaning_computes_the_same_on_random_functions():
    generator = torch.Generator().manual_seed(0)

    def pick(items):
        return items[int(torch.randint(len(items), (), generator=generator))]

    for _ in range(5):
        steps = []
        unary = [
            op.negative, op.square, lambda v: op.reshape(v, (3, 2)), lambda v: op.reshape(v, (2, 3)),
            lambda v: op.permute_dims(v, [1, 0]), lambda v: op.sum(v, [0], keepdims=True),
            lambda v: op.broadcast_to(v, (2, *[int(e) for e in v.ty.shape])), lambda v: op.ones_like(v),
        ]  # fmt: skip
        for _ in range(12):
            steps.append((pick(unary), pick([op.add, op.multiply, op.subtract]), pick([0, 1, -1])))

        def build(scope, x, steps=steps):
            values = [x]
            for first, second, constant in steps:
                source = values[-1]
                size = 1
                for extent in source.ty.shape:
                    size *= int(extent)
                if size != 6 or len(source.ty.shape) != 2:
                    source = x
                value = scope.emit(first(source))
                values.append(scope.emit(second(value, relax.const(constant, "float64"))))
            return values[1:]

        func = function(build, draw(2, 3))
        cleaned = clean(func)
        assert len(list(bindings(cleaned))) < len(list(bindings(func)))
        for ours, wanted in zip(evaluate(cleaned, draw(2, 3)), evaluate(func, draw(2, 3)), strict=True):
            torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-12)
        assert clean(cleaned) is cleaned
