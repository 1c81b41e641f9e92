"""``explain``: a dispatched module's programs, in a screen; every saved tensor with a reason; counted bytes."""

import re

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM

from benchmarks.saved_bytes import saved_for_backward
from bridge import add_tvm_dispatch, explain, stats


def bert():
    config = BertConfig(
        vocab_size=61,
        num_hidden_layers=2,
        hidden_size=24,
        num_attention_heads=3,
        intermediate_size=40,
        max_position_embeddings=20,
        attn_implementation="eager",
    )
    return BertForMaskedLM(config).train()


@pytest.fixture(scope="module")
def dispatched():
    torch.manual_seed(0)
    model = bert()
    batch = {"input_ids": torch.randint(0, 61, (2, 7)), "labels": torch.randint(0, 61, (2, 7))}
    add_tvm_dispatch(model, batch)
    model(**batch).loss.backward()
    model.eval()
    model(**batch)
    model.train()
    return model, batch


def test_it_fits_a_screen(dispatched):
    lines = str(explain(dispatched[0])).splitlines()
    assert len(lines) <= 50
    assert max(map(len, lines)) <= 120
    text = "\n".join(lines)
    for word in ("1 entry", "1 hits", "1 misses", "guard", "compiled", "forward", "backward", "saved", "flop", "moved"):
        assert word in text
    assert "miss: 1 x training flag" in text


def test_the_full_report_leaves_nothing_out(dispatched):
    report = explain(dispatched[0], full=True)
    text = str(report)
    assert text == str(explain(dispatched[0]).full)
    (entry,) = report.entries
    for saved in (*entry.plan.saved_tensors, *entry.plan.free):
        assert saved.name in text and saved.reason in text
    steps = [step for program in entry.programs for step in program.steps if step.kind != "view"]
    assert sum(len(program.table()) for program in entry.programs) == len(steps)
    assert all(f"b{step.index} " in text for step in entry.programs[1].steps if step.kind != "view")
    assert "..." not in text


def test_long_tables_are_cut_in_a_notebook(dispatched):
    html = explain(dispatched[0])._repr_html_()
    assert re.search(r"\.\.\. \d{3,} more reads: print\(report\.full\)", html) and len(html) < 100_000


def test_every_saved_tensor_has_a_reason_and_a_place(dispatched):
    (entry,) = explain(dispatched[0]).entries
    plan = entry.plan
    assert plan.saved_tensors
    for saved in (*plan.saved_tensors, *plan.free):
        assert len(saved.reason.split()) >= 3
        assert saved.bytes > 0
    assert all(entry.lowered.origin(saved.name).aten for saved in plan.saved_tensors)
    at_the_root = sum(not saved.module_path for saved in plan.saved_tensors)
    assert at_the_root <= 5, "the loss alone is: maximum and logarithm of a row, the count, what is made of labels"


@pytest.mark.cpu("in place of masks that its kernels compute, a GPU's call keeps states that lie in one memory")
def test_bytes_agree_with_saved_tensors_hooks(dispatched):
    """The autograd Function's saved tensors, counted by torch: parameters, inputs, outputs are free."""
    model, batch = dispatched
    entry = explain(model).entries[0]
    seen = saved_for_backward(model, lambda: model(**batch), batch, outputs_free=True)
    assert stats(model).entries[0].hits > 1
    assert entry.kept_bytes == seen
    assert entry.plan.bytes < seen  # masks are kept too


def test_steps_know_their_module_and_their_cost(dispatched):
    (entry,) = explain(dispatched[0]).entries
    forward, backward = entry.programs
    modules = {path for program in entry.programs for step in program.steps for path in step.modules.split(", ")}
    assert {
        "bert.encoder.layer.0.intermediate.dense",
        "bert.encoder.layer.1.attention.self",
        "cls.predictions.decoder",
    } <= modules
    products = [step for step in forward.steps if "matmul" in step.what or step.name in ("mm", "bmm", "matmul", "bmm")]
    sequence, width, inner, tokens = 7, 24, 40, 14
    per_layer = 2 * tokens * (4 * width * width + 2 * width * inner) + 2 * 2 * 2 * 3 * sequence * sequence * 8
    head = 2 * tokens * (width * width + width * 61)
    assert sum(step.flops for step in products) == pytest.approx(2 * per_layer + head, rel=0.02)
    assert backward.flops > forward.flops
    assert all(step.bytes > 0 for program in entry.programs for step in program.steps if step.kind != "view")


def test_compile_time_by_stage(dispatched):
    (entry,) = explain(dispatched[0]).entries
    assert list(entry.seconds)[:3] == ["captured", "imported", "masked"]
    assert {"split", "translate", "build"} <= set(entry.seconds)
    assert all(spent >= 0 for spent in entry.seconds.values())


@pytest.mark.cpu("forms of a CPU's machine code; tests/gpu/test_seeing has a GPU's")
def test_sources_of_kernels_with_where_they_come_from(dispatched):
    forward = explain(dispatched[0]).entries[0].programs[0]
    row = next(step for step in forward.steps if "erf" in step.what)
    text = forward.source(row.name)
    assert "@T.prim_func" in text and "intermediate_act_fn" in text and "aten.gelu.default" in text and ".py:" in text
    assert "define" in forward.source(row.name.split("_")[0], "llvm")
    assert ".text" in forward.source(row.name, form="asm")
    with pytest.raises(KeyError, match="no kernel 'nothing' in the forward"):
        forward.source("nothing")
    with pytest.raises(ValueError, match="form: wanted one of 'tvmscript', 'llvm', 'asm', got 'ptx'"):
        forward.source(row.name, "ptx")


class Named(nn.Module):
    """The same computation under another name and path."""

    def __init__(self, name):
        super().__init__()
        self.inner = nn.ModuleDict({name: nn.Linear(3, 3)})
        self.name = name

    def forward(self, x):
        return torch.sin(self.inner[self.name](x))


def test_a_shared_program_reports_each_owners_places():
    x = torch.randn(2, 3)
    first, second = (add_tvm_dispatch(Named(name), x) for name in ("one", "two"))
    programs = [explain(module).entries[0].programs[0] for module in (first, second)]
    assert programs[0].program is programs[1].program
    for program, name in zip(programs, ("one", "two"), strict=True):
        paths = " ".join(step.modules for step in program.steps)
        assert f"inner.{name}" in paths
        assert any("torch.sin" in origin.line for step in program.steps for origin in step.origins)


def test_html(dispatched):
    text = explain(dispatched[0])._repr_html_()
    assert text.count("<details>") == text.count("</details>") >= 5
    assert "saved for the backward" in text and "training flag" in text
    assert "<script" not in text


def test_forward_only_and_not_dispatched():
    module = nn.Linear(3, 2).eval()
    with pytest.raises(ValueError, match="Linear is not dispatched"):
        explain(module)
    with torch.no_grad():
        add_tvm_dispatch(module, torch.randn(1, 3))
    report = explain(module)
    assert report.entries[0].plan is None and len(report.entries[0].programs) == 1
    assert "nothing is saved" in str(report) and "<details>" in report._repr_html_()
