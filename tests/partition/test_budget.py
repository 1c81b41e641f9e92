"""Budgets and the curve: fewer bytes, more work, masks untouched, the unreachable said."""

from __future__ import annotations

from dataclasses import replace

import pytest

from partition import MinCut, curve, partition
from tests.partition import joints
from tests.partition.backprop import bert
from tests.partition.joints import Builder, op


@pytest.fixture(scope="module")
def layer():
    return bert(1, 2, 16, 32, 4)


def plan_of(made, strategy):
    joint, num_primals, num_outputs = made
    return partition(joint, num_primals=num_primals, num_outputs=num_outputs, strategy=strategy).plan


@pytest.mark.parametrize("budget", [0.9, 0.5, 0.3, 0.1, 0.0])
def test_a_fraction_is_kept_to(layer, budget):
    plan = plan_of(layer, MinCut(budget=budget, allow_matmul_recompute=True))
    assert plan.bytes <= budget * plan.save_all_bytes
    assert plan.notes == ()


def test_bytes_are_kept_to(layer):
    free = plan_of(layer, "min_cut")
    plan = plan_of(layer, MinCut(budget=free.bytes - 1, allow_matmul_recompute=True))
    assert 0 < plan.bytes < free.bytes and plan.cost.flops > free.cost.flops


def test_no_more_is_given_up_than_the_budget_asks_for(layer):
    """One byte too many: the cheapest capture goes, not the one that frees most per flop (the probabilities)."""
    small = MinCut(policy=lambda node: "save" if node.bytes < 1000 else None)
    free = plan_of(layer, small)
    plan = plan_of(layer, replace(small, budget=free.bytes - 1, allow_matmul_recompute=True))
    assert [name for name in plan.recomputed if name.endswith(("_mm", "_qk", "_pv"))] == ["l0_pv"]


def test_a_generous_budget_changes_nothing(layer):
    assert plan_of(layer, MinCut(budget=10**9)).saved_tensors == plan_of(layer, MinCut()).saved_tensors


@pytest.mark.parametrize("budget", [0.5, 0.1, 0])
def test_masks_stay_one_byte_and_are_never_made_again(layer, budget):
    joint, num_primals, _ = layer
    plan = plan_of(layer, MinCut(budget=budget, allow_matmul_recompute=True))
    masks = [saved for saved in plan.free if saved.kind == "mask"]
    assert [saved.name for saved in masks] == [p.name for p in joint.params[:num_primals] if p.name.startswith("mask_")]
    for saved in masks:
        count = 1
        for extent in saved.shape:
            count *= extent
        assert saved.dtype == "bool" and saved.bytes == count
        assert saved.name not in plan.recomputed


def test_out_of_reach_says_what_stands_in_the_way(layer):
    plan = plan_of(layer, MinCut(budget=0.1))
    assert plan.bytes > 0.1 * plan.save_all_bytes
    (note,) = plan.notes
    assert "out of reach" in note and "l0_up_mm" in note and "allow_matmul_recompute is off" in note
    assert note in plan.table()
    assert not any(name.endswith("_mm") for name in plan.recomputed)


def test_out_of_reach_because_of_the_policy():
    strategy = MinCut(budget=0, policy=lambda node: "save" if node.name == "r" else None, allow_matmul_recompute=True)
    plan = plan_of(joints.mlp(), strategy)
    assert [saved.name for saved in plan.saved_tensors] == ["r"]
    assert "the policy saves it" in plan.notes[0]


def two_scans_of_a_product():
    """Two scans of one product, each as large as it: the cut, which recomputes no scan, saves both."""
    b = Builder()
    x, g = b.param("x", (4, 4)), b.param("grad_out", (4, 4))
    p = b.let("p", op.matmul(x, x))
    down, right = b.let("down", op.cumsum(p, 0)), b.let("right", op.cumsum(p, 1))
    y = b.let("y", op.sum(b.let("both", op.add(down, right))))
    first, second = b.let("first", op.multiply(g, down)), b.let("second", op.multiply(g, right))
    return b.build(y, first, second), 1, 1


def test_the_least_is_found_where_no_single_capture_can_be_given_up():
    made = two_scans_of_a_product()
    assert {saved.name for saved in plan_of(made, "min_cut").saved_tensors} == {"down", "right"}
    plan = plan_of(made, MinCut(budget=4 * 4 * 4))
    assert [saved.name for saved in plan.saved_tensors] == ["p"] and plan.notes == ()
    assert plan.saved_tensors[0].reason == "fewest bytes: needed by multiply of first"
    (note,) = plan_of(made, MinCut(budget=4 * 4 * 4 - 1)).notes
    assert "64 bytes is the least" in note and "p, 64 bytes (matmul is a matrix product or convolution" in note


def test_row_statistics_are_not_given_up_for_nothing():
    """The least is the product alone; mean(p^2) beside it is a row more, and half the work: an unreachable budget
    does not give it up."""
    b = Builder()
    rows, width = 8, 512
    x, w = b.param("x", (rows, 16)), b.param("w", (16, width))
    p = b.let("p", op.matmul(x, w))
    r = b.let("r", op.rsqrt(b.let("m", op.mean(b.let("s", op.square(p)), [1], keepdims=True))))
    y = b.let("n", op.multiply(p, r))
    g = b.param("grad_out", (rows, width))
    made = b.build(b.let("total", op.sum(y)), b.let("d", op.multiply(b.let("e", op.multiply(g, r)), y))), 2, 1
    wide, row = rows * width * 4, rows * 4
    free = plan_of(made, "min_cut")
    assert free.bytes == wide + row
    reached = plan_of(made, MinCut(budget=wide))
    assert reached.bytes == wide and reached.notes == ()
    missed = plan_of(made, MinCut(budget=wide - 1))
    assert missed.saved_tensors == free.saved_tensors and missed.cost == free.cost
    assert f"{wide:,} bytes is the least, and {wide + row:,} are saved" in missed.notes[0]


def test_the_extremes_are_in_the_plan(layer):
    plan, nothing = plan_of(layer, "min_cut"), plan_of(layer, "recompute_all")
    assert plan.inputs_only == nothing.cost and plan.inputs_only.flops > plan.cost.flops
    assert f"inputs only 0 bytes, {nothing.cost.flops:,} flops" in plan.table()
    assert f"save_all {plan_of(layer, 'save_all').bytes:,} bytes" in plan.table()


def test_curve(layer):
    joint, num_primals, num_outputs = layer
    budgets = (0.5, 0.3, 0.1)
    points = curve(joint, num_primals=num_primals, num_outputs=num_outputs, budgets=budgets)
    assert [(p.strategy, p.budget) for p in points] == [
        ("save_all", None),
        ("min_cut", None),
        *((f"min_cut(budget={budget})", budget) for budget in budgets),
        ("recompute_all", None),
    ]
    assert all(p.reached for p in points)
    assert sorted((p.bytes for p in points), reverse=True) == [p.bytes for p in points]
    assert sorted(p.flops for p in points) == [p.flops for p in points]
    limited = curve(joint, num_primals=num_primals, num_outputs=num_outputs, budgets=(0.1,), strategy=MinCut())
    assert not limited[2].reached
