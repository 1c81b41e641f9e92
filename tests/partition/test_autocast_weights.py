"""Casts of weights that the forward makes for its products, saved for the backward."""

from __future__ import annotations

import numpy as np
import pytest

from autodiff.ir import Function, bindings, op_name
from partition import partition
from tests.partition.evaluate import random_args, run_both_halves
from tests.partition.joints import Builder, op

HALF = "float16"


def autocast_linear() -> tuple[Function, int, int]:
    """``half(x) @ half(w).T + half(b)`` and all gradients, in float32."""
    b = Builder()
    w, bias, x = b.param("w", (5, 4)), b.param("bias", (5,)), b.param("x", (3, 4))
    g = b.param("grad_out", (3, 5), HALF)
    half_w, half_bias, half_x = (b.let(f"half_{v.name}", op.astype(v, HALF)) for v in (w, bias, x))
    turned = b.let("turned", op.permute_dims(half_w))
    y = b.let("y", op.add(b.let("mm", op.matmul(half_x, turned)), half_bias))
    dx = b.let("dx", op.astype(b.let("half_dx", op.matmul(g, half_w)), "float32"))
    dw = b.let("dw", op.astype(b.let("half_dw", op.matmul(b.let("gt", op.permute_dims(g)), half_x)), "float32"))
    db = b.let("db", op.astype(b.let("half_db", op.sum(g, axis=[0])), "float32"))
    return b.build(y, dw, db, dx), 3, 1


def casts(function: Function) -> list[str]:
    return [var.name for var, value in bindings(function) if op_name(value) == "relax.astype"]


@pytest.mark.parametrize("cast_once, kept", [(0, []), (1, ["half_w"]), (2, ["half_w"]), (3, ["half_w", "half_x"])])
def test_a_weight_is_cast_once(cast_once, kept):
    joint, num_primals, num_outputs = autocast_linear()
    counts = {"num_primals": num_primals, "num_outputs": num_outputs}
    usual = partition(joint, **counts)
    parts = partition(joint, **counts, cast_once=cast_once)
    assert [saved.name for saved in parts.plan.saved_tensors] == kept
    assert casts(parts.backward) == [name for name in casts(usual.backward) if name not in kept]
    args = random_args(joint.params)
    wanted, found = (run_both_halves(each, num_primals, num_outputs, args) for each in (usual, parts))
    for a, b in zip((*wanted[0], *wanted[1]), (*found[0], *found[1]), strict=True):
        np.testing.assert_array_equal(a, b)
