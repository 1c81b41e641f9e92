"""Products saved in the place of softmaxes that are computed again from them."""

from __future__ import annotations

import numpy as np
import pytest

import autodiff
from autodiff.ir import TensorType, TupleGetItem, TupleType, bindings, op_name
from autodiff.library import call
from partition import partition
from tests.partition.backprop import bert
from tests.partition.evaluate import random_args, run_both_halves
from tests.partition.joints import Builder, op


@pytest.mark.parametrize("dropout", [True, False])
def test_a_softmax_that_only_dropout_reads(dropout):
    joint, num_primals, num_outputs = bert(batch=2, seq=16, width=32, heads=4, dropout=dropout, dtype="float64")
    joint = autodiff.clean(joint)
    counts = {"num_primals": num_primals, "num_outputs": num_outputs}
    usual, other = (partition(joint, **counts, save_logits=again) for again in (False, True))
    saved = {each.name for each in usual.plan.saved_tensors} ^ {each.name for each in other.plan.saved_tensors}
    # without dropout a product reads it: it is in memory
    assert saved == ({"l0_probs", "l0_qk"} if dropout else set())
    assert other.plan.bytes == usual.plan.bytes
    again = [op_name(value) for _, value in bindings(other.backward)].count("relax.nn.softmax")
    assert again == dropout
    args = random_args(joint.params)
    wanted, found = (run_both_halves(each, num_primals, num_outputs, args) for each in (usual, other))
    for a, b in zip((*wanted[0], *wanted[1]), (*found[0], *found[1]), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_softmax_of_one_of_several_results():
    """The result is saved in its place: the tuple of all results is no tensor."""
    b = Builder()
    x, mask, g = b.param("x", (8, 4)), b.param("mask_0", (8, 4), "bool"), b.param("grad_out", (8, 4))
    pair = b.let("pair", call("both", [x], TupleType([TensorType((8, 4), "float32")] * 2)))
    item = b.let("item", TupleGetItem(pair, 0))
    probs = b.let("probs", op.nn.softmax(item))
    kept = b.let("kept", op.astype(mask, "float32"))
    y = b.let("y", op.multiply(probs, kept))
    grad = b.let("grad", op.multiply(b.let("dprobs", op.multiply(g, kept)), probs))
    joint = b.build(y, grad, b.let("other", TupleGetItem(pair, 1)))
    counts = {"num_primals": 2, "num_outputs": 1}
    usual, again = (partition(joint, **counts, save_logits=again) for again in (False, True))
    assert {each.name for each in usual.plan.saved_tensors} ^ {each.name for each in again.plan.saved_tensors} == {
        "probs",
        "item",
    }
