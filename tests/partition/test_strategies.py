"""Every strategy: the same outputs bit for bit, the same gradients, functions of the promised form."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax

from autodiff.ir import bindings, dtype, nbytes, results, shape
from partition import STRATEGIES, MinCut, build_graph, coloring, partition
from tests.partition import joints
from tests.partition.evaluate import evaluate, random_args, run_both_halves

JOINTS = [joints.mlp, joints.layer_norm, joints.tuples, joints.corners]


@pytest.mark.parametrize("strategy", list(STRATEGIES))
@pytest.mark.parametrize("make", JOINTS, ids=lambda make: make.__name__)
def test_same_numbers(make, strategy):
    joint, num_primals, num_outputs = make()
    parts = partition(joint, num_primals=num_primals, num_outputs=num_outputs, strategy=strategy)
    args = random_args(joint.params)
    expected = evaluate(joint, args)
    outputs, gradients = run_both_halves(parts, num_primals, num_outputs, args)
    for found, wanted in zip(outputs, expected[:num_outputs], strict=True):
        np.testing.assert_array_equal(found, wanted)
    for found, wanted in zip(gradients, expected[num_outputs:], strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("strategy", list(STRATEGIES))
@pytest.mark.parametrize("make", JOINTS, ids=lambda make: make.__name__)
def test_form_of_the_two_functions(make, strategy):
    joint, num_primals, num_outputs = make()
    parts = partition(joint, num_primals=num_primals, num_outputs=num_outputs, strategy=strategy)
    plan, forward, backward = parts.plan, parts.forward, parts.backward
    primals, grad_outs = joint.params[:num_primals], joint.params[num_primals:]
    assert [p.name for p in forward.params] == [p.name for p in primals]
    forward_results = results(forward)
    assert len(forward_results) == num_outputs + len(plan.saved_tensors)
    for result, saved in zip(forward_results[num_outputs:], plan.saved_tensors, strict=True):
        assert (result.name, shape(result), dtype(result), nbytes(result)) == (
            saved.name,
            saved.shape,
            saved.dtype,
            saved.bytes,
        )
        assert saved.kind == "intermediate" and saved.reason
    expected_params = [primals[i].name for i in plan.saved_primals]
    expected_params += [results(joint)[i].name for i in plan.saved_outputs]
    expected_params += [saved.name for saved in plan.saved_tensors] + [p.name for p in grad_outs]
    assert [p.name for p in backward.params] == expected_params
    assert len(results(backward)) == len(results(joint)) - num_outputs
    mod = tvm.IRModule({"forward": forward, "backward": backward, "joint": joint})
    relax.analysis.well_formed(mod)  # raises


@pytest.mark.parametrize("make", JOINTS, ids=lambda make: make.__name__)
def test_forward_bindings_do_not_depend_on_the_strategy(make):
    joint, num_primals, num_outputs = make()
    heads = []
    for strategy in STRATEGIES:
        parts = partition(joint, num_primals=num_primals, num_outputs=num_outputs, strategy=strategy)
        graph = build_graph(joint, num_primals, num_outputs)
        text = [(var.name, str(value)) for var, value in bindings(parts.forward)]
        heads.append(text[: len(graph.forward)])
        assert [name for name, _ in heads[-1]] == [name for name in graph.nodes if name in graph.forward]
    assert all(head == heads[0] for head in heads)


def test_halves_run_in_tvm():
    joint, num_primals, num_outputs = joints.layer_norm()
    args = random_args(joint.params)
    expected = evaluate(joint, args)
    for strategy in STRATEGIES:
        parts = partition(joint, num_primals=num_primals, num_outputs=num_outputs, strategy=strategy)
        mod = tvm.IRModule(
            {
                "forward": parts.forward.with_attr("global_symbol", "forward"),
                "backward": parts.backward.with_attr("global_symbol", "backward"),
            }
        )
        machine = relax.VirtualMachine(tvm.compile(mod, "llvm"), tvm.cpu())
        tensors = [tvm.runtime.tensor(arg) for arg in args]
        found = list(machine["forward"](*tensors[:num_primals]))
        saved = [tensors[i] for i in parts.plan.saved_primals] + [found[i] for i in parts.plan.saved_outputs]
        gradients = machine["backward"](*saved, *found[num_outputs:], *tensors[num_primals:])
        for value, wanted in zip([*found[:num_outputs], *gradients], expected, strict=True):
            np.testing.assert_allclose(value.numpy(), wanted, rtol=2e-4, atol=2e-5)


def test_save_all_saves_what_the_gradient_reads():
    joint, num_primals, num_outputs = joints.mlp()
    plan = partition(joint, num_primals=num_primals, num_outputs=num_outputs, strategy="save_all").plan
    assert [saved.name for saved in plan.saved_tensors] == [
        "a",
        "r",
    ]  # not positive, computed from a
    assert plan.saved_tensors[1].reason == "needed by matmul of dw2"
    assert plan.recomputed == ()
    assert plan.bytes == plan.save_all_bytes == 2 * 8 * 64 * 4


def test_views_are_saved_as_their_base():
    joint, num_primals, num_outputs = joints.layer_norm()
    plan = partition(joint, num_primals=num_primals, num_outputs=num_outputs, strategy="save_all").plan
    names = {saved.name for saved in plan.saved_tensors}
    assert "kept" not in names  # the float form of a byte mask
    assert {saved.name for saved in plan.free if saved.kind == "mask"} == {"mask_0"}
    assert all(saved.dtype != "bool" or saved.bytes == 8 * 32 for saved in plan.free)


def test_recompute_all_keeps_only_inputs():
    for make in JOINTS:
        joint, num_primals, num_outputs = make()
        plan = partition(joint, num_primals=num_primals, num_outputs=num_outputs, strategy="recompute_all").plan
        assert plan.saved_tensors == () and plan.saved_outputs == () and plan.bytes == 0


def test_colors():
    joint, num_primals, num_outputs = joints.mlp()
    colors = coloring(build_graph(joint, num_primals, num_outputs))
    assert colors["h"] == "red" and colors["a"] == "blue" and colors["dx"] == "black"
    assert colors["x"] == "green" and colors["b1"] == "white"


def test_a_shape_alone_saves_nothing():
    b = joints.Builder()
    x, g = b.param("x", (4, 4)), b.param("grad_out", ())
    e = b.let("e", relax.op.exp(x))
    y = b.let("y", relax.op.sum(e))
    ones = b.let("ones", relax.op.ones_like(e))
    dx = b.let("dx", relax.op.multiply(ones, g))
    parts = partition(b.build(y, dx), num_primals=1, num_outputs=1, strategy="save_all")
    assert parts.plan.total_bytes == 0


def test_tuples_are_captured_by_item():
    joint, num_primals, num_outputs = joints.tuples()
    plan = partition(joint, num_primals=num_primals, num_outputs=num_outputs, strategy="save_all").plan
    assert sorted(saved.name for saved in plan.saved_tensors) == ["pair_1", "twice"]


def test_errors():
    joint, num_primals, num_outputs = joints.mlp()
    with pytest.raises(ValueError, match='unknown partition strategy "best"; choose'):
        partition(joint, num_primals=num_primals, num_outputs=num_outputs, strategy="best")
    with pytest.raises(TypeError, match="choose method"):
        partition(joint, num_primals=num_primals, num_outputs=num_outputs, strategy=3)
    with pytest.raises(ValueError, match="depends on a grad_out"):
        partition(joint, num_primals=num_primals, num_outputs=2, strategy="save_all")
    with pytest.raises(ValueError, match="num_primals=9"):
        partition(joint, num_primals=9, num_outputs=1, strategy="save_all")


def test_random_draw_is_refused():
    b = joints.Builder()
    x, g = b.param("x", (4, 4)), b.param("grad_out", (4, 4))
    pair = b.let("pair", relax.op.nn.dropout(x, 0.5))
    y = b.let("y", relax.TupleGetItem(pair, 0))
    dx = b.let("dx", relax.op.multiply(y, g))
    with pytest.raises(ValueError, match=r"pair = relax.nn.dropout draws random numbers"):
        partition(b.build(y, dx), num_primals=1, num_outputs=1, strategy="save_all")


@pytest.mark.parametrize("strategy", [*STRATEGIES, MinCut(budget=0.9), MinCut(budget=0.2)], ids=str)
def test_a_scaled_mask_is_saved_as_bytes(strategy):
    """``mask / (1 - p)`` is wider than the mask and says no more."""
    b = joints.Builder()
    x, w, mask = b.param("x", (8, 16)), b.param("w", (16, 32)), b.param("mask_0", (8, 32), "bool")
    g = b.param("grad_out", (8, 32))
    h = b.let("h", relax.op.matmul(x, w))
    positive = b.let("positive", relax.op.greater(h, relax.const(0.0)))
    kept = b.let("kept", relax.op.astype(positive, "float32"))
    noise = b.let("noise", relax.op.astype(mask, "float32"))
    scaled = b.let("scaled", relax.op.multiply(noise, relax.const(1.25)))
    gate = b.let("gate", relax.op.multiply(kept, relax.const(0.5)))
    y = b.let("y", relax.op.multiply(b.let("dropped", relax.op.multiply(h, scaled)), gate))
    gg = b.let("gg", relax.op.multiply(b.let("gd", relax.op.multiply(g, gate)), scaled))
    joint = b.build(y, b.let("dw", relax.op.matmul(b.let("xt", relax.op.permute_dims(x)), gg)))
    plan = partition(joint, num_primals=3, num_outputs=1, strategy=strategy).plan
    assert not {saved.name for saved in plan.saved_tensors} & {"noise", "scaled", "kept", "gate"}
    if strategy != "recompute_all":
        assert [(saved.name, saved.bytes) for saved in plan.saved_tensors] == [("positive", 8 * 32)]
    assert [(saved.name, saved.bytes) for saved in plan.free if saved.kind == "mask"] == [("mask_0", 8 * 32)]
