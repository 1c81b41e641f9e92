"""A concatenation in the backward of a value that is also a result: the forward saves it in place of a copy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from autodiff.ir import Function, bindings, op_name
from partition import Partitioned, partition
from partition.graph import Choice, JointGraph
from tests.partition.evaluate import random_args, run_both_halves
from tests.partition.joints import Builder, op

STEPS = 5


def states(returned: str = "turned", given: int = 1, read_again: bool = False) -> Function:
    """States ``h = x @ w`` of all steps, and the gradient of ``u`` from the states before the steps, as in a loop.

    Args:
        returned: ``"turned"``: h in another order; ``"h"``; ``"product"``: nothing of h's elements alone.
        given: states before the first one of h.
        read_again: whether the backward also reads the states after the steps.
    """
    b = Builder()
    x, w, first = b.param("x", (STEPS, 4)), b.param("w", (4, 4)), b.param("first", (given, 4))
    grad = b.param("grad_out", (STEPS - 1 + given, 4))
    h = b.let("h", op.matmul(x, w))
    turned = b.let("turned", op.permute_dims(h))
    y = {"turned": turned, "h": h}[returned] if returned != "product" else b.let("y", op.matmul(h, w))
    rest = b.let("rest", op.strided_slice(h, [0], [0], [STEPS - 1], [1]))
    before = b.let("before", op.concat((first, rest), 0))
    du = b.let("du", op.matmul(b.let("before_turned", op.permute_dims(before)), grad))
    more = [b.let("du_again", op.add(du, b.let("total", op.sum(rest))))] if read_again else []
    return b.build(y, du, *more)


@dataclass
class Saving:
    """Saves one value."""

    value: str
    name: str = "saving"

    def choose(self, graph: JointGraph) -> Choice:
        return Choice({self.value: "for a test"})


def halves(joint: Function, save_concatenation: bool, strategy: str | Saving = "min_cut") -> Partitioned:
    return partition(joint, num_primals=3, num_outputs=1, save_concatenation=save_concatenation, strategy=strategy)


def joins(half: Function) -> int:
    return [op_name(value) for _, value in bindings(half)].count("relax.concat")


@pytest.mark.parametrize(("saved", "returned"), [("h", "turned"), ("rest", "turned"), ("rest", "product")])
def test_the_forward_joins(saved, returned):
    joint = states(returned)
    usual, other = (halves(joint, behind, Saving(saved)) for behind in (False, True))
    assert [[each.name for each in half.plan.saved_tensors] for half in (usual, other)] == [[saved], ["before"]]
    assert f"{saved} would be copied" in other.plan.saved_tensors[0].reason
    assert [(joins(each.forward), joins(each.backward)) for each in (usual, other)] == [(0, 1), (1, 0)]
    args = random_args(joint.params)
    wanted, found = (run_both_halves(each, 3, 1, args) for each in (usual, other))
    for a, b in zip((*wanted[0], *wanted[1]), (*found[0], *found[1]), strict=True):
        np.testing.assert_array_equal(a, b)


def test_so_does_that_of_a_minimum_cut():
    usual, other = (halves(states(), behind).plan for behind in (False, True))
    assert [[each.name for each in plan.saved_tensors] for plan in (usual, other)] == [["rest"], ["before"]]


@pytest.mark.parametrize(
    ("joint", "saved"),
    [
        (states("h"), None),
        (states("product"), "h"),
        (states(given=2), "rest"),
        (states(read_again=True), "rest"),
    ],
    ids=["a result is saved", "nothing is copied", "more would be saved", "others read it"],
)
def test_others_stay(joint, saved):
    strategy = Saving(saved) if saved else "min_cut"
    usual, other = (halves(joint, behind, strategy) for behind in (False, True))
    assert usual.plan.table() == other.plan.table() and joins(other.backward) == 1
