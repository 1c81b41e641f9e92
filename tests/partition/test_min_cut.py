"""The minimum cut's saved tensors, on joint functions small enough to know."""

from __future__ import annotations

import pytest
from tvm import relax

from autodiff.ir import TensorType, bindings
from partition import MinCut, budget, build_graph, partition
from tests.partition import joints
from tests.partition.backprop import bert, differentiate
from tests.partition.joints import Builder, library_call, op


def plan_of(made, strategy="min_cut", **more):
    joint, num_primals, num_outputs = made
    return partition(joint, num_primals=num_primals, num_outputs=num_outputs, strategy=strategy, **more).plan


def names(plan):
    return [saved.name for saved in plan.saved_tensors]


def test_relu_mlp_keeps_the_product_only():
    plan = plan_of(joints.mlp())
    assert names(plan) == ["h"]
    assert plan.recomputed == ("a", "r")
    assert "matrix product" in plan.saved_tensors[0].reason


def test_row_statistics_instead_of_rows():
    plan = plan_of(joints.layer_norm())
    assert names(plan) == ["mean", "var"]
    assert plan.bytes == 2 * 8 * 4


def test_a_byte_mask_beats_the_floats_it_is_made_from():
    """ReLU after a product that nothing else in the backward reads: save ``h > 0`` in bytes, not ``h``."""
    b = Builder()
    x, w = b.param("x", (8, 16)), b.param("w", (16, 64))
    h = b.let("h", op.matmul(x, w))
    joint = differentiate(b, [b.let("y", op.nn.relu(h))], [w])
    plan = plan_of(joint)
    assert [(saved.dtype, saved.bytes) for saved in plan.saved_tensors] == [("bool", 8 * 64)]
    assert "only the gradient needs it" in plan.saved_tensors[0].reason
    assert plan_of(joint, "save_all").bytes == 8 * 64 * 4


def test_transformer_layer():
    """Per layer: q, k, v, probabilities, context, two normalized sums, the product before GELU, row statistics."""
    layers, batch, seq, width, heads = 3, 2, 16, 32, 4
    plan = plan_of(bert(layers, batch, seq, width, heads))
    unit = batch * seq * width * 4
    probabilities, statistics = batch * heads * seq * seq * 4, 4 * batch * seq * 4
    assert plan.bytes <= layers * (10 * unit + probabilities + statistics)
    assert not [name for name in names(plan) if name.endswith(("_act", "_y", "_drop"))]
    assert {saved.name: saved.bytes for saved in plan.free if saved.kind == "mask"}["mask_l0_o"] == batch * seq * width
    assert not any("_mm" in name or "_qk" in name or "_pv" in name for name in plan.recomputed)


def test_recomputation_stays_within_a_layer():
    """Saving a residual sum costs as much as saving the product that goes into it, and cuts the chain of sums."""
    joint, num_primals, num_outputs = bert(3, 2, 16, 32, 4)
    graph = build_graph(joint, num_primals, num_outputs)
    plan = plan_of((joint, num_primals, num_outputs))
    saved = set(names(plan))
    for layer in range(3):
        stack, seen = [f"l{layer}_ln1_y"], set()
        while stack:
            name = stack.pop()
            if name in seen or name in saved or graph.nodes[name].value is None:
                continue
            seen.add(name)
            stack.extend(graph.nodes[name].inputs)
        assert seen and all(name.startswith(f"l{layer}_") for name in seen)


def test_equal_layers_are_cut_once(monkeypatch):
    solve, counts = budget._solve, []
    for layers in (3, 6):
        solved = []
        monkeypatch.setattr(budget, "_solve", lambda edges, solved=solved: solved.append(edges) or solve(edges))
        plan = plan_of(bert(layers, 2, 16, 32, 4))
        assert len(solved) == len(set(solved)) < len(plan.saved_tensors)
        counts.append(len(solved))
    assert counts[0] == counts[1], "as many for six layers as for three"


def test_a_part_is_kept_rather_than_the_whole_but_never_a_view():
    b = Builder()
    x, w = b.param("x", (8, 16)), b.param("w", (16, 64))
    h = b.let("h", op.matmul(x, w))
    part = b.let("part", op.strided_slice(h, axes=[1], begin=[0], end=[4]))
    flat = b.let("flat", op.reshape(part, (32,)))
    y = b.let("y", op.exp(flat))
    g = b.param("grad_out", (32,))
    dw = b.let("dw", op.multiply(g, flat))
    joint = b.build(b.let("total", op.sum(y)), dw), 2, 1
    assert names(plan_of(joint)) == ["part"]
    assert names(plan_of(joint, "save_all")) == ["h"]


def test_an_output_is_free():
    b = Builder()
    x, g = b.param("x", (8, 8)), b.param("grad_out", (8, 8))
    y = b.let("y", op.tanh(b.let("h", op.matmul(x, x))))
    dx = b.let("dx", op.multiply(g, b.let("yy", op.multiply(y, y))))
    plan = plan_of((b.build(y, dx), 1, 1))
    assert names(plan) == [] and plan.saved_outputs == (0,) and plan.saved_primals == ()
    assert plan.bytes == 0 and plan.total_bytes == 8 * 8 * 4


def test_policy_saves_and_recomputes():
    made = joints.mlp()
    keep_relu = MinCut(policy=lambda node: "save" if node.op == "relax.nn.relu" else None)
    plan = plan_of(made, keep_relu)
    assert "r" in names(plan)
    assert {saved.name: saved.reason for saved in plan.saved_tensors}["r"] == "forced: the policy saves it"

    drop_products = MinCut(policy=lambda node: "recompute" if node.op == "relax.matmul" else None)
    plan = plan_of(made, drop_products)
    assert names(plan) == ["h"]
    assert any("wants h recomputed" in note and "allow_matmul_recompute is off" in note for note in plan.notes)

    allowed = MinCut(policy=drop_products.policy, allow_matmul_recompute=True)
    plan = plan_of(made, allowed)
    assert "h" not in names(plan) and plan.notes == ()

    everything = MinCut(policy=lambda node: "recompute", allow_matmul_recompute=True)
    assert plan_of(made, everything).bytes == 0


def test_policy_sees_module_paths():
    made = joints.mlp()
    seen = {}
    policy = MinCut(policy=lambda node: seen.update({node.name: node.module_path}))
    plan = plan_of(made, policy, module_paths={"h": "encoder.up", "a": ""})
    assert seen["h"] == "encoder.up" and seen["a"] == seen["r"] == ""  # a node without a path has its operand's
    assert plan.saved_tensors[0].module_path == "encoder.up"
    assert "encoder.up" in plan.table()


def test_policy_with_a_wrong_answer():
    with pytest.raises(ValueError, match="answered 'keep' for h"):
        plan_of(joints.mlp(), MinCut(policy=lambda node: "keep"))


def test_no_finite_cut_falls_back_to_the_colouring_and_says_so():
    """A library call whose result is no tensor, read by the backward: it can be neither saved nor called again."""
    b = Builder()
    x, g = b.param("x", (4, 4)), b.param("grad_out", (4, 4))
    state = b.let("state", library_call("prepare", [b.let("e", op.exp(x))], relax.AnyType()))
    y = b.let("y", library_call("finish", [state], TensorType([4, 4], "float32")))
    dx = b.let("dx", library_call("finish_backward", [state, g], TensorType([4, 4], "float32")))
    joint, num_primals, num_outputs = b.build(y, dx), 1, 1
    parts = partition(joint, num_primals=num_primals, num_outputs=num_outputs)
    assert len(parts.plan.notes) == 1
    wanted = "fell back to the colouring because no finite cut exists; in the way: state (a AnyType, library.prepare is"
    assert wanted in parts.plan.notes[0]
    assert "state" in [var.name for var, _ in bindings(parts.backward)]


def test_wrong_arguments():
    with pytest.raises(TypeError, match="budget is a fraction"):
        MinCut(budget="half")
    with pytest.raises(ValueError, match="must not be negative"):
        MinCut(budget=-1)
    with pytest.raises(TypeError, match="policy is a callable"):
        MinCut(policy="save")
