"""Values saved in the order in which products read them: fewer copies, the same numbers."""

from __future__ import annotations

import numpy as np
import pytest

import autodiff
from autodiff.ir import Function, bindings, op_name, results, shape
from partition import partition, rebuild_backward
from tests.partition.backprop import bert, differentiate
from tests.partition.evaluate import evaluate, random_args, run_both_halves
from tests.partition.joints import Builder, op

HEADS = (2, 4, 16, 8)


def attention(cleaned: bool = True) -> tuple[Function, int, int]:
    joint, num_primals, num_outputs = bert(batch=2, seq=16, width=32, heads=4, dtype="float64")
    return autodiff.clean(joint) if cleaned else joint, num_primals, num_outputs


def permutations(function: Function) -> list[tuple[int, ...]]:
    """Result shapes of permutations other than a swap of the last two axes."""
    found = [call for _, call in bindings(function) if op_name(call) == "relax.permute_dims"]
    swaps = [[*range(len(shape(call)) - 2), len(shape(call)) - 1, len(shape(call)) - 2] for call in found]
    axes = [[int(axis) for axis in call.attrs.axes or reversed(range(len(shape(call))))] for call in found]
    return [shape(call) for call, mine, swap in zip(found, axes, swaps, strict=True) if mine != swap]


@pytest.mark.parametrize("strategy", ["min_cut", "save_all", "recompute_all"])
@pytest.mark.parametrize("cleaned", [False, True])
def test_the_numbers_are_the_same(cleaned, strategy):
    joint, num_primals, num_outputs = attention(cleaned)
    counts = {"num_primals": num_primals, "num_outputs": num_outputs}
    args = random_args(joint.params)
    usual, other = (partition(joint, **counts, strategy=strategy, as_read=as_read) for as_read in (False, True))
    assert other.plan.bytes == usual.plan.bytes
    for wanted, found in zip(
        run_both_halves(usual, num_primals, num_outputs, args),
        run_both_halves(other, num_primals, num_outputs, args),
        strict=True,
    ):
        for a, b in zip(wanted, found, strict=True):
            np.testing.assert_array_equal(a, b)


def test_heads_are_saved_and_the_backward_permutes_none():
    joint, num_primals, num_outputs = attention()
    counts = {"num_primals": num_primals, "num_outputs": num_outputs}
    usual, other = (partition(joint, **counts, as_read=as_read) for as_read in (False, True))
    assert [saved.shape for saved in usual.plan.saved_tensors].count(HEADS) == 1  # the context
    assert [saved.shape for saved in other.plan.saved_tensors].count(HEADS) == 3  # query, key and value
    # the rest are gradients: of the context, and of query, key and value
    assert len(permutations(other.backward)) == 4 < len(permutations(usual.backward))


def test_permutations_that_are_made_here_stand_where_their_values_do():
    joint, num_primals, num_outputs = attention()
    paths = {var.name: f"layer.{var.name}" for var, _ in bindings(joint)}
    counts = {"num_primals": num_primals, "num_outputs": num_outputs}
    saved_tensors = partition(joint, **counts, module_paths=paths, as_read=True).plan.saved_tensors
    made = [saved for saved in saved_tensors if saved.name not in paths]
    assert made and all(saved.module_path == f"layer.{saved.name.removesuffix('_rows')}" for saved in made)


def test_a_value_with_another_reader_is_saved_as_it_is():
    b = Builder()
    x, w = b.param("x", (4, 8, 6)), b.param("w", (8, 4, 5))
    h = b.let("h", op.exp(x))
    turned = b.let("turned", op.permute_dims(h, [1, 2, 0]))
    rows = b.let("rows", op.matmul(turned, w))
    joint, num_primals, num_outputs = differentiate(b, [rows, b.let("other", op.tanh(h))], [x, w])
    counts = {"num_primals": num_primals, "num_outputs": num_outputs}
    plan = partition(joint, **counts, strategy="save_all", as_read=True).plan
    assert "h" in {saved.name for saved in plan.saved_tensors}


def test_a_backward_for_other_grad_outs():
    def joint_for(given):
        b = Builder()
        x, w = b.param("x", (2, 5, 3, 4), "float64"), b.param("w", (2, 3, 4, 4), "float64")
        h = b.let("h", op.tanh(x))
        heads = b.let("heads", op.permute_dims(h, [0, 2, 1, 3]))
        y = b.let("y", op.matmul(heads, w))
        z = b.let("z", op.matmul(heads, b.let("yt", op.permute_dims(y, [0, 1, 3, 2]))))
        return differentiate(b, [y, z], [x, w], given)

    joint, num_primals, num_outputs = joint_for(None)
    counts = {"num_primals": num_primals, "num_outputs": num_outputs}
    cleaned = autodiff.clean(joint)
    parts = partition(cleaned, **counts, as_read=True)
    partial, *_ = joint_for((1,))
    partial = autodiff.clean(partial)
    backward = rebuild_backward(partial, parts.plan, **counts)
    args = random_args(cleaned.params)
    found = evaluate(parts.forward, args[:num_primals])
    saved = [args[index] for index in parts.plan.saved_primals]
    saved += [found[index] for index in parts.plan.saved_outputs] + found[num_outputs:]
    wanted = evaluate(partial, [*args[:num_primals], args[-1]])[num_outputs:]
    for a, b in zip(wanted, evaluate(backward, [*saved, args[-1]]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)
    assert len(results(backward)) == len(wanted)
