"""Products saved in the place of softmaxes that are computed again from them."""

from __future__ import annotations

import numpy as np
import pytest

import autodiff
from autodiff.ir import bindings, op_name
from partition import partition
from tests.partition.backprop import bert
from tests.partition.evaluate import random_args, run_both_halves


@pytest.mark.parametrize("dropout", [True, False])
def test_a_softmax_that_only_dropout_reads(dropout):
    joint, num_primals, num_outputs = bert(batch=2, seq=16, width=32, heads=4, dropout=dropout, dtype="float64")
    joint = autodiff.clean(joint)
    counts = {"num_primals": num_primals, "num_outputs": num_outputs}
    usual, other = (partition(joint, **counts, rows_again=again) for again in (False, True))
    saved = {each.name for each in usual.plan.captures} ^ {each.name for each in other.plan.captures}
    # without dropout a product reads it: it is in memory
    assert saved == ({"l0_probs", "l0_qk"} if dropout else set())
    assert other.plan.bytes == usual.plan.bytes
    again = [op_name(value) for _, value in bindings(other.backward)].count("relax.nn.softmax")
    assert again == dropout
    args = random_args(joint.params)
    wanted, found = (run_both_halves(each, num_primals, num_outputs, args) for each in (usual, other))
    for a, b in zip((*wanted[0], *wanted[1]), (*found[0], *found[1]), strict=True):
        np.testing.assert_array_equal(a, b)
