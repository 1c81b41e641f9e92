"""Bytes saved for the backward: eager, plans and torch's min-cut counted alike; plans name modules for policies."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import memory_curve
from benchmarks.saved_bytes import SavedBytes, eager_saved_bytes, plan_with, saved_bytes
from bridge import add_tvm_dispatch, lower, stats
from bridge.compile import compile_function
from bridge.show.report import kept_bytes
from partition import MinCut
from partition import cut as split_file
from partition.cut import backward_order, peak_bytes
from tests.bridge.compare import Call, assert_same, clone_tree, run
from tests.bridge.models import bert_layer

FLOAT = 4


class Normed(nn.Module):
    """Counts its calls, draws a mask, has statistics and a sub-module."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + F.dropout(self.down(F.gelu(self.up(x))), 0.5, self.training))


def test_eager_bytes_of_an_mlp():
    module, x = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)), torch.randn(4, 8)
    assert eager_saved_bytes(module, (x,)) == 2 * 4 * 32 * FLOAT  # the operands of GELU and of the second product


def test_the_comparison():
    torch.manual_seed(0)
    module, x = Normed().train(), torch.randn(16, 8, requires_grad=True)
    lowered = lower(module, x)
    state, generator = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    found = saved_bytes(lowered, module, (x,))
    assert torch.equal(torch.get_rng_state(), generator), "the generator was not put back"
    for name, value in module.state_dict().items():
        assert torch.equal(value, state[name]), f"{name} was changed"

    mask = 16 * 8
    assert found.inputs_only == mask and found.plan == lowered.plan.bytes + mask
    assert found.save_all == lowered.plan.save_all_bytes + mask
    assert found.inputs_only < found.plan < found.save_all < found.eager
    assert found.plan <= found.torch_min_cut <= found.eager
    text = found.table()
    assert "min_cut" in text and "save_all" in text and "inputs only" in text and f"{found.eager:,}" in text
    assert "torch's min-cut (" in text and f"{found.plan / found.eager:.3f} of eager" in text


def test_a_dispatched_module_is_measured_as_eager():
    module, x = Normed().train(), torch.randn(16, 8, requires_grad=True)
    before = eager_saved_bytes(module, (x,))
    add_tvm_dispatch(module, x)
    assert eager_saved_bytes(module, (x,)) == before
    assert stats(module).hits == 0


def test_keyword_arguments():
    class Scaled(nn.Module):
        def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
            return torch.tanh(x * 2).exp() * scale

    x = torch.randn(5, requires_grad=True)
    kwargs = {"scale": torch.randn(5)}
    lowered = lower(Scaled(), x, sample_kwargs=kwargs)
    assert saved_bytes(lowered, Scaled(), (x,), kwargs).eager == 2 * 5 * FLOAT


def test_torch_min_cut_may_not_apply():
    from benchmarks.saved_bytes import torch_min_cut_or_reason

    class Untraceable(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x.detach().sum().item()

    found, note = torch_min_cut_or_reason(Untraceable(), (torch.ones(3, requires_grad=True),))
    assert found is None and note.startswith("does not apply: ")
    row = SavedBytes("min_cut", 1, 2, 0, 4, found, note).table().splitlines()[-1]
    assert note in row and row.rstrip().endswith("-")


def test_nothing_requires_grad():
    module, x = nn.Linear(3, 3).requires_grad_(False), torch.randn(2, 3)
    with pytest.raises(ValueError, match="nothing requires grad"):
        saved_bytes(lower(module, x), module, (x,))


@pytest.mark.cpu("the benchmark counts what is saved on the host")
def test_the_curve_is_printed_and_drawn(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(memory_curve.BLOCKS, "small", (Normed, (16, 8)))
    picture = tmp_path / "curve.png"
    memory_curve.curve_table("small", str(picture))
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    names = [row.split("|")[1].strip() for row in rows[1:]]
    assert names[:2] == ["save_all", "min_cut"] and names[-1] == "recompute_all"
    kept = [float(row.split("|")[3]) for row in rows[1:]]
    assert kept == sorted(kept, reverse=True) and kept[0] == 1 and kept[-1] == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit, match="no row is called 'nonesuch'"):
        memory_curve.curve_table("nonesuch")


# Module paths, and a policy that goes by them


@pytest.mark.cpu("the values that are saved on the CPU")
def test_the_plan_says_which_module_a_value_belongs_to():
    torch.manual_seed(0)
    plan = lower(bert_layer(), torch.randn(2, 9, 24), partition="save_all").plan
    paths = {saved.name: saved.module_path for saved in (*plan.saved_tensors, *plan.free)}
    assert paths["layer_norm_normalized"] == "attention.output.LayerNorm"
    assert paths["layer_norm_rstd_1"] == "output.LayerNorm"
    assert paths["mask_0"] == "attention.self" and paths["mask_2"] == "output.dropout"
    assert {"attention.self.query", "attention.self.value", "intermediate.dense"} <= set(paths.values())
    assert "attention.output.LayerNorm" in plan.table()


@pytest.mark.cpu("the values that are saved on the CPU")
def test_a_policy_by_module_path_decides_what_a_dispatched_call_saves():
    torch.manual_seed(0)
    module, x = bert_layer().double().train(), torch.randn(2, 9, 24, dtype=torch.float64, requires_grad=True)
    plain = lower(module, x).plan
    attention = {s.name for s in plain.saved_tensors if s.module_path.startswith("attention.self")}
    assert len(attention) >= 4

    def policy(node):
        return "recompute" if node.module_path.startswith("attention.self") else None

    copied = add_tvm_dispatch(
        copy.deepcopy(module), x, partition=MinCut(policy=policy, allow_matmul_recompute=True), on_miss="error"
    )
    plan = stats(copied).entries[0].plan
    assert not [s for s in plan.saved_tensors if s.module_path.startswith("attention.self")]
    assert attention <= set(plan.recomputed)
    others = {s.name for s in plain.saved_tensors} - attention
    assert others <= {s.name for s in plan.saved_tensors}
    assert_same(run(copied, Call(*clone_tree(((x,), {})))), run(module, Call(*clone_tree(((x,), {})))))

    keep = MinCut(policy=lambda node: "save" if node.module_path == "intermediate.intermediate_act_fn" else None)
    forced = [s for s in lower(module, x, partition=keep).plan.saved_tensors if s.reason.startswith("forced")]
    assert [s.module_path for s in forced] == ["intermediate.intermediate_act_fn"]


def test_strategies_are_compared_without_lowering_again():
    lowered = lower(Normed(), torch.randn(16, 8))
    for strategy in ("save_all", "recompute_all", MinCut(budget=0.2, allow_matmul_recompute=True)):
        again = lower(Normed(), torch.randn(16, 8), partition=strategy)
        assert dataclasses.replace(plan_with(lowered, strategy), saved_tensors=(), free=()) == dataclasses.replace(
            again.plan, saved_tensors=(), free=()
        )
        assert kept_bytes(lowered, plan_with(lowered, strategy)) == kept_bytes(again)


# The order of the backward, in the compiled program's arena


class Deep(nn.Sequential):
    """Layers whose activations are computed again."""

    def __init__(self):
        super().__init__(*(layer for _ in range(5) for layer in (nn.Linear(16, 16), nn.GELU(), nn.Tanh())))


def test_recomputing_late_keeps_less_alive(monkeypatch):
    """A recomputed value runs in the kernel of its late reader."""
    module, x, peaks = Deep(), torch.randn(64, 16, requires_grad=True), []

    def early(graph, body) -> list[str]:
        order = [name for name in graph.nodes if name in body]
        peaks.append([peak_bytes(graph, each) for each in (backward_order(graph, body), order)])
        return order

    def arena() -> int:
        return compile_function(lower(module, x).backward, name="backward").arena_bytes

    ordered = arena()
    monkeypatch.setattr(split_file, "backward_order", early)
    assert ordered <= arena()
    ((late, at_once),) = peaks
    assert late + 2 * 64 * 16 * FLOAT <= at_once
