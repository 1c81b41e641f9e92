"""Stages of the lowering: listed, printed, compared, traced to the user's code, and run on their own."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autodiff.ir import bindings
from bridge import add_tvm_dispatch, lower, stats
from bridge.verify.check import check
from bridge.verify.inputs import eager_reference


class Block(nn.Module):
    """A product, an activation, dropout, a norm and a running buffer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.batch = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.25)

    def forward(self, x):
        return self.batch(self.norm(self.drop(F.gelu(self.first(x)))))


@pytest.fixture(scope="module")
def lowered():
    torch.manual_seed(0)
    return lower(Block().double(), torch.randn(5, 6, dtype=torch.float64, requires_grad=True))


def test_every_stage_is_listed_with_its_pass_and_node_counts(lowered):
    names = [stage.name for stage in lowered]
    assert names == [
        *("captured", "imported", "masked", "spelled", "forward", "joint", "cleaned", "split forward", "split backward")
    ]
    for earlier, later in zip(lowered.stages, lowered.stages[1:-1], strict=False):
        assert later.before == earlier.size
        assert f"{later.before} -> {later.size} nodes" in later.provenance
    assert lowered["joint"].size > lowered["forward"].size
    assert all(stage.name in str(lowered) and stage.made_by in str(lowered) for stage in lowered)
    with pytest.raises(KeyError, match="no stage 'nothing'; there are captured, imported"):
        lowered["nothing"]


def test_a_stage_prints_its_ir_under_its_provenance(lowered):
    text = str(lowered["cleaned"])
    head, _, body = text.partition("\n")
    assert head.startswith("# cleaned: autodiff.clean_joint, ") and " ms, " in head
    assert "@R.function" in body and "grad_out_0" in body
    assert "torch.ops.aten.gelu.default" in str(lowered["captured"])
    assert "<summary>cleaned" in lowered["cleaned"]._repr_html_()


def test_the_captured_graph_is_no_relax_function(lowered):
    with pytest.raises(TypeError, match="'captured' is an ATen graph"):
        _ = lowered["captured"].function


@pytest.mark.parametrize("stage", ["captured", "imported", "masked", "spelled", "forward", "split forward"])
def test_forward_stages_run_as_eager(lowered, stage):
    eager = eager_reference(lowered, seed=3)
    found = lowered[stage].run(lowered.inputs(stage, seed=3))
    for mine, theirs in zip(found, eager.results, strict=False):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("stage", ["joint", "cleaned", "split backward"])
def test_backward_stages_run_as_autograd(lowered, stage):
    eager = eager_reference(lowered, seed=3)
    found = lowered[stage].run(lowered.inputs(stage, seed=3))
    found = found if stage == "split backward" else found[lowered.num_results :]
    assert len(found) == len(eager.gradients) > 0
    for mine, theirs in zip(found, eager.gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


def test_running_a_stage_leaves_module_and_generator_alone(lowered):
    module = lowered.sample.module
    before = {name: value.clone() for name, value in module.state_dict().items()}
    state = torch.get_rng_state()
    lowered["forward"].run(lowered.inputs("forward"))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(param.grad is None for param in module.parameters())


def test_inputs_are_checked(lowered):
    inputs = lowered.inputs("forward")
    with pytest.raises(ValueError, match=r"wanted \d+ inputs, got"):
        lowered["forward"].run(inputs[:-1])
    with pytest.raises(ValueError, match="p_first_weight: wanted float64 of shape"):
        lowered["forward"].run([inputs[0][:1], *inputs[1:]])


def test_a_dispatched_module_keeps_no_sample():
    module, x = nn.Linear(3, 2), torch.randn(4, 3)
    add_tvm_dispatch(module, x)
    with pytest.raises(ValueError, match="keeps no sample"):
        check(stats(module).entries[0].lowered)


def test_diff_counts_operators_and_names_bindings(lowered):
    joint = lowered.diff("forward", "joint")
    assert joint.operators["grad.no_grad"][1] == 0  # its work is done
    assert any(line.startswith("grad_p_first_weight: float64[8, 6] = ") for line in joint.added)
    assert joint.same + len(joint.removed) == lowered["forward"].size
    assert joint.same + len(joint.added) == lowered["joint"].size
    masked = lowered.diff("imported", "masked")
    assert masked.operators["dropout"] == (1, 0)
    assert any("dropout(" in line for line in masked.removed)
    assert "-1" in str(masked) and "+++ masked" in str(masked)
    assert lowered.diff("joint", "joint").lines == ()
    assert str(joint).count("\n+ ") < joint.text().count("\n+ ")
    with pytest.raises(KeyError, match="no stage"):
        lowered.diff("joint", "nothing")


def test_every_variable_knows_where_it_comes_from(lowered):
    assert lowered.origin("gelu").aten == "aten.gelu.default"
    assert "F.gelu" in lowered.origin("gelu").line
    assert lowered.origin("linear__2").module == "first"
    assert lowered.origin("mask_0_scaled").module == "drop"
    assert lowered.origin("layer_norm_mean").module == "norm"
    assert lowered.origin("grad_p_first_weight").module == "first"
    found = lowered.origins()
    named = [var.name for var, _ in bindings(lowered["cleaned"].function)]
    unknown = [name for name in named if name not in found]
    assert len(unknown) <= 0.05 * len(named), unknown


def test_every_value_of_a_recurrence_beside_an_attention_can_be_placed():
    """Only the backward reads values that are joined after differentiation."""

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(8, 12, batch_first=True)
            self.attention = nn.MultiheadAttention(12, 2, dropout=0.1, batch_first=True)

        def forward(self, x):
            states, _ = self.rnn(x)
            return states + self.attention(states, states, states, need_weights=False)[0]

    lowered = lower(Own().train(), torch.randn(2, 5, 8))
    placed = lowered.origins()
    assert {"rnn", "attention"} <= {origin.module for origin in placed.values()}
