"""Passes for inference: foldings and merges, functions that stay, cuts of a function."""

from __future__ import annotations

import pytest
from tvm.script import ir as I
from tvm.script import relax as R

from autodiff.inference import fold_scales, merge_products, split_static
from autodiff.ir import bindings, op_name, results


def operators(function) -> list[str | None]:
    return [op_name(value) for _, value in bindings(function)]


@I.ir_module
class LeftAlone:
    """Functions that resemble a scale of channels or parallel products, and are neither."""

    @R.function(private=True)
    def along_rows(w: R.Tensor((6, 4), "float32"), s: R.Tensor((4, 1), "float32"), x: R.Tensor((4, 6), "float32")):
        with R.dataflow():
            y = R.multiply(R.matmul(x, w), s)
            R.output(y)
        return (y,)

    @R.function(private=True)
    def read_twice(w: R.Tensor((6, 4), "float32"), s: R.Tensor((4,), "float32"), x: R.Tensor((4, 6), "float32")):
        with R.dataflow():
            p = R.matmul(x, w)
            y = R.multiply(p, s)
            R.output(y, p)
        return (y, p)

    @R.function(private=True)
    def only_shifted(w: R.Tensor((6, 4), "float32"), s: R.Tensor((4,), "float32"), x: R.Tensor((4, 6), "float32")):
        with R.dataflow():
            y = R.add(R.matmul(x, w), s)
            R.output(y)
        return (y,)

    @R.function(private=True)
    def divided_by(w: R.Tensor((6, 4), "float32"), s: R.Tensor((4,), "float32"), x: R.Tensor((4, 6), "float32")):
        with R.dataflow():
            y = R.divide(s, R.matmul(x, w))
            R.output(y)
        return (y,)

    @R.function(private=True)
    def in_half_types(w: R.Tensor((6, 4), "float16"), s: R.Tensor((4,), "float16"), x: R.Tensor((4, 6), "float16")):
        with R.dataflow():
            y = R.multiply(R.matmul(x, w), s)
            R.output(y)
        return (y,)

    @R.function(private=True)
    def broadcast(w: R.Tensor((6, 4), "float32"), s: R.Tensor((2, 1, 4), "float32"), x: R.Tensor((4, 6), "float32")):
        with R.dataflow():
            y = R.multiply(R.matmul(x, w), s)
            R.output(y)
        return (y,)

    @R.function(private=True)
    def other_inputs(v: R.Tensor((6, 4), "float32"), w: R.Tensor((6, 4), "float32"), x: R.Tensor((4, 6), "float32")):
        with R.dataflow():
            y = R.add(R.matmul(x, v), R.matmul(R.exp(x), w))
            R.output(y)
        return (y,)


@pytest.mark.parametrize("apply", [fold_scales, merge_products], ids=lambda apply: apply.__name__)
@pytest.mark.parametrize("name", [str(var.name_hint) for var in LeftAlone.functions])
def test_what_is_left_alone(name, apply):
    before = operators(LeftAlone[name])
    assert sorted(map(str, operators(apply(LeftAlone[name], 2)))) == sorted(map(str, before))


@I.ir_module
class Cut:
    @R.function(private=True)
    def main(
        w: R.Tensor((6, 4), "float32"),
        b: R.Tensor((4,), "float32"),
        unused: R.Tensor((9,), "float32"),
        x: R.Tensor((5, 6), "float32"),
    ):
        with R.dataflow():
            turned = R.permute_dims(w)
            back = R.permute_dims(turned)
            root = R.sqrt(b)
            wide = R.broadcast_to(root, R.shape([5, 4]))
            ones = R.ones(R.shape([5, 4]), "float32")
            places = R.arange(R.prim_value(0), R.prim_value(4), R.prim_value(1), "float32")
            p = R.matmul(x, back)
            q = R.add(R.add(R.add(p, wide), ones), places)
            alone = R.exp(root)
            R.output(q, alone)
        return (q, alone, b)


def test_a_function_is_cut_where_computing_begins_and_views_end():
    split = split_static(Cut["main"], 3)
    assert [str(value.name) for value in results(split.constants)] == ["w", "root", "places", "alone", "b"]
    assert set(operators(split.constants)) == {"relax.sqrt", "relax.arange", "relax.exp"}
    assert {"relax.permute_dims", "relax.broadcast_to", "relax.ones"} < set(operators(split.call))
    assert not {"relax.sqrt", "relax.arange", "relax.exp"} & set(operators(split.call))
    assert (len(split.constants.params), len(split.call.params), len(results(split.constants))) == (3, 6, 5)
    assert split.weights == ()  # the product's factor is a parameter as it is


def test_folded_factors_are_named():
    folded = fold_scales(LeftAlone["only_shifted"], 2)
    assert split_static(folded, 2).weights == ()
    scaled = fold_scales(_scaled(), 2)
    assert split_static(scaled, 2).weights == (0,)


def _scaled():
    @I.ir_module
    class Scaled:
        @R.function(private=True)
        def main(w: R.Tensor((6, 4), "float32"), s: R.Tensor((4,), "float32"), x: R.Tensor((4, 6), "float32")):
            with R.dataflow():
                y = R.multiply(R.matmul(x, w), s)
                R.output(y)
            return (y,)

    return Scaled["main"]
