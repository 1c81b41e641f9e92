"""A backward for other grad_outs from the values that a plan already saves."""

from __future__ import annotations

import pytest

from autodiff.ir import TensorType, Var, build_function, results
from partition import build_graph, partition, rebuild_backward
from partition.plan import fingerprints
from tests.partition.backprop import bert, differentiate
from tests.partition.joints import Builder, op


def two_outputs(given=None, factor=op.tanh, swap=False):
    b = Builder()
    x, w = b.param("x", (4, 4)), b.param("w", (4, 4))
    h = b.let("h", op.matmul(x, w))
    y = b.let("y", factor(h))
    z = b.let("z", op.matmul(y, w))
    outputs = [z, y] if swap else [y, z]
    return differentiate(b, outputs, [x, w], given)


def test_parameters_and_results():
    joint, num_primals, num_outputs = two_outputs()
    plan = partition(joint, num_primals=num_primals, num_outputs=num_outputs).plan
    partial, *_ = two_outputs(given=(1,))
    backward = rebuild_backward(partial, plan, num_primals=num_primals, num_outputs=num_outputs)
    saved = [saved.name for saved in (*plan.free, *plan.saved_tensors)]
    assert [param.name for param in backward.params] == [*saved, "grad_out_1"]
    assert len(results(backward)) == 2


def test_another_forward_is_refused():
    joint, num_primals, num_outputs = two_outputs()
    plan = partition(joint, num_primals=num_primals, num_outputs=num_outputs).plan
    assert plan.saved_outputs == (0,)
    other, *_ = two_outputs(factor=op.nn.relu)
    with pytest.raises(ValueError, match=r"output 0 \(y\), which this joint function does not return"):
        rebuild_backward(other, plan, num_primals=num_primals, num_outputs=num_outputs)
    swapped, *_ = two_outputs(swap=True)
    with pytest.raises(ValueError, match="does not return"):
        rebuild_backward(swapped, plan, num_primals=num_primals, num_outputs=num_outputs)


def test_a_capture_computed_in_another_way_is_refused():
    joint, num_primals, num_outputs = bert(1, 2, 16, 32, 4)
    plan = partition(joint, num_primals=num_primals, num_outputs=num_outputs).plan
    other, *_ = bert(1, 2, 16, 32, 4, scale=3.0)
    with pytest.raises(ValueError, match="computes in another way"):
        rebuild_backward(other, plan, num_primals=num_primals, num_outputs=num_outputs)


def test_a_primal_that_was_not_saved_is_named():
    b = Builder()
    x, w = b.param("x", (4,)), b.param("w", (4,))
    y = b.let("y", op.multiply(x, w))
    z = b.let("z", op.add(x, w))
    first = differentiate(b, [y, z], [x, w], given=(1,))
    plan = partition(first[0], num_primals=2, num_outputs=2).plan
    assert plan.saved_primals == ()
    b = Builder()
    x, w = b.param("x", (4,)), b.param("w", (4,))
    y = b.let("y", op.multiply(x, w))
    z = b.let("z", op.add(x, w))
    second = differentiate(b, [y, z], [x, w], given=(0, 1))
    with pytest.raises(ValueError, match=r"needs the primals \['x', 'w'\], which the plan \(min_cut\) does not save"):
        rebuild_backward(second[0], plan, num_primals=2, num_outputs=2)


def test_a_value_is_the_same_where_what_it_reads_is_a_result():
    found = []
    for given in (["z"], ["y", "z"]):
        x, y, z = (Var(name, TensorType((4, 4), "float32")) for name in "xyz")
        bindings = [(y, op.tanh(x)), (z, op.exp(y))]
        function = build_function([x], bindings, [{"y": y, "z": z}[name] for name in given])
        graph = build_graph(function, 1, len(given))
        found.append(list(fingerprints(graph).values()))
    assert found[0] == found[1]
