"""Operands of products behind residual sums: saved where the backward would compute one from another."""

from __future__ import annotations

import numpy as np

from autodiff.ir import Function, bindings, op_name
from partition import partition
from tests.partition.evaluate import random_args, run_both_halves
from tests.partition.joints import Builder, op

BLOCKS = 4


def residual() -> tuple[Function, int, int]:
    """Blocks ``h' = relu(h @ w * s + h)`` of float32, and the gradient of each ``w`` for one ``grad_out`` per block.

    Each block's product is saved for the gradient of its scale; so its sum can be computed again.
    """
    b = Builder()
    x = b.param("x", (8, 4))
    weights = [b.param(f"w{i}", (4, 4)) for i in range(BLOCKS)]
    scales = [b.param(f"s{i}", (4,)) for i in range(BLOCKS)]
    grads = [b.param(f"grad_out{i}", (8, 4)) for i in range(BLOCKS)]
    hidden, products = [x], []
    for i, (w, s) in enumerate(zip(weights, scales, strict=True)):
        products.append(b.let(f"mm{i}", op.matmul(hidden[-1], w)))
        total = b.let(f"sum{i}", op.add(b.let(f"scaled{i}", op.multiply(products[-1], s)), hidden[-1]))
        hidden.append(b.let(f"h{i}", op.nn.relu(total)))
    y = b.let("y", op.matmul(hidden[-1], weights[0]))
    found = []
    for i in reversed(range(BLOCKS)):
        turned = b.let(f"turned{i}", op.permute_dims(hidden[i + 1]))
        found.append(b.let(f"dw{i}", op.matmul(turned, grads[i])))
        found.append(b.let(f"ds{i}", op.sum(b.let(f"scaled_grad{i}", op.multiply(grads[i], products[i])), axis=[0])))
    return b.build(y, *found), 1 + 2 * BLOCKS, 1


def test_one_block_at_most_is_computed_again():
    joint, num_primals, num_outputs = residual()
    counts = {"num_primals": num_primals, "num_outputs": num_outputs}
    usual, other = (partition(joint, **counts, bound_recompute=short) for short in (False, True))
    relus = [[op_name(value) for _, value in bindings(each.backward)].count("relax.nn.relu") for each in (usual, other)]
    assert relus == [BLOCKS, 1]
    more = {each.name for each in other.plan.saved_tensors} - {each.name for each in usual.plan.saved_tensors}
    assert more == {f"h{i}" for i in range(1, BLOCKS)}
    args = random_args(joint.params)
    wanted, found = (run_both_halves(each, num_primals, num_outputs, args) for each in (usual, other))
    for a, b in zip((*wanted[0], *wanted[1]), (*found[0], *found[1]), strict=True):
        np.testing.assert_array_equal(a, b)
