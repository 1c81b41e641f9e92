"""``lowered.check()`` finds planted errors at their stage and operator, and accepts rounding."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from tvm import relax

import autodiff
from autodiff.body import on_functions
from autodiff.gradients import registry
from autodiff.ir import dtype
from bridge import lower
from bridge.aten.registry import CONVERSIONS
from bridge.base.session import SESSION
from bridge.compile.translate import TRANSLATIONS
from bridge.verify.inputs import deviation, tolerance
from bridge.verify.repro import replay
from tests.bridge.models import NoGradBlock, bert_layer
from tests.device import DEVICE

ROOT = Path(__file__).parents[3]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 3)
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        return self.second(self.drop(F.gelu(self.first(x)))).tanh()


def net(dtype=torch.float32):
    torch.manual_seed(0)
    return lower(Net().to(dtype), torch.randn(5, 6, dtype=dtype, requires_grad=True))


@contextlib.contextmanager
def gradient_rule(name, change):
    """The rule of an operator, with ``change(call, partial)`` on its first partial derivative."""
    right = registry.RULES[name]

    def planted(call, y, grad, emit):
        first, *rest = right(call, y, grad, emit)
        return [change(call, first), *rest]

    registry.RULES[name] = planted
    try:
        yield
    finally:
        registry.RULES[name] = right


def times(factor):
    return lambda call, partial: relax.op.multiply(partial, relax.const(factor, dtype(call)))


def cancelled(call, partial):
    """Loses digits and nothing else: ``(partial + large) - large``."""
    large = relax.const(1e5, dtype(call))
    return relax.op.subtract(relax.op.add(partial, large), large)


def test_nothing_deviates_where_nothing_is_wrong():
    found = net().check()
    assert found.ok and found.first is None
    assert {stage.verdict for stage in found.stages} == {"agrees"}
    assert [stage.name for stage in found.stages][-2:] == ["compiled forward", "compiled backward"]
    assert list(found.allowed) == ["float32", "float64"]
    assert "every stage agrees with autograd" in str(found) and "every stage" in found._repr_html_()


def test_a_wrong_gradient_rule_is_found_at_its_stage_and_operator():
    with gradient_rule("relax.nn.gelu", times(1.001)):
        found = net().check()
    assert found.first.name == "joint"
    assert found.first.culprit.op == "gelu" and found.first.culprit.binding == "gelu"
    assert "F.gelu(self.first(x))" in found.first.culprit.origin.line
    assert "gradient rule" in str(found)
    forward = [stage for stage in found.stages if stage.name in ("imported", "forward", "compiled forward")]
    assert {stage.verdict for stage in forward} == {"agrees"}


def test_a_small_error_that_only_float64_shows_is_found():
    """A relative error of 1e-6 is within float32's rounding."""
    with gradient_rule("relax.tanh", times(1 + 1e-6)):
        found = net().check()
    assert found.first.name == "joint" and found.first.culprit.op == "tanh"
    assert found.first.deviations["float32"] < found.allowed["float32"]


def test_planted_rounding_is_no_bug():
    with gradient_rule("relax.nn.gelu", cancelled):
        found = net().check()
    assert found.ok
    joint = next(stage for stage in found.stages if stage.name == "joint")
    assert joint.verdict == "rounding"
    assert joint.deviations["float32"] > found.allowed["float32"]
    assert joint.deviations["float64"] < found.allowed["float64"]


def test_a_wrong_conversion_is_found(monkeypatch):
    target = torch.ops.aten.tanh.default
    monkeypatch.setitem(CONVERSIONS, target, lambda importer, node, x: importer.emit(relax.op.atan(x)))
    found = net(torch.float64).check()
    assert found.first.name == "imported"
    assert found.first.culprit.op == "atan" and found.first.culprit.origin.aten == "aten.tanh.default"


def test_a_wrong_pass_is_found(monkeypatch):
    right = autodiff.clean_joint

    @on_functions
    def planted(body):
        """Takes every negative number for a positive one."""
        right(body)
        for binding in body.bindings:
            if binding.op == "relax.erf":
                body.assign(binding, relax.op.abs(binding.value.args[0]))

    monkeypatch.setattr(autodiff, "clean_joint", planted)
    found = net(torch.float64).check()
    assert found.first.name == "cleaned" and found.first.culprit.op == "abs"


def test_a_wrong_kernel_is_found(monkeypatch):
    def planted(builder, call):
        return builder.pointwise("sigmoid", [builder.get(call.args[0])], dtype(call))

    SESSION.reset("programs")
    monkeypatch.setitem(TRANSLATIONS, "relax.tanh", planted)
    try:
        found = net(torch.float64).check()
    finally:
        SESSION.reset("programs")
    assert found.first.name == "compiled forward"
    assert found.first.culprit.op == "tanh"


def test_one_dtype_only():
    assert list(net().check(dtype=torch.float64).allowed) == ["float64"]


def test_stopped_gradients_and_narrow_types():
    assert lower(NoGradBlock(), torch.randn(4, 6, requires_grad=True)).check().ok
    found = lower(nn.Linear(4, 3).bfloat16(), torch.randn(5, 4, dtype=torch.bfloat16)).check()
    assert found.ok and list(found.allowed) == ["bfloat16", "float64"]


def test_autocast_is_part_of_the_sample():
    torch.manual_seed(0)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        lowered = lower(Net(), torch.randn(5, 6))
    found = lowered.check()
    assert found.ok, found
    assert list(found.allowed) == ["bfloat16", "float64"]


@pytest.mark.sweep  # as the small networks do
def test_a_bert_layer_agrees():
    torch.manual_seed(0)
    found = lower(bert_layer(dropout=0.1).double(), torch.randn(2, 5, 24, dtype=torch.float64)).check()
    assert found.ok, found


def test_forward_only():
    with torch.no_grad():
        lowered = lower(nn.Sequential(nn.Linear(4, 3), nn.ReLU()).eval(), torch.randn(2, 4))
    assert [stage.name for stage in lowered.check().stages][-1] == "compiled forward"


def test_a_module_that_changed_since_is_refused():
    module = nn.Linear(4, 3)
    lowered = lower(module, torch.randn(2, 4))
    module.weight = nn.Parameter(torch.randn(3, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match="weight has changed its shape or type"):
        lowered.check()


def test_deviation_sees_what_it_should():
    one = torch.tensor([1.0, -2.0])
    assert deviation(one, one) == 0.0
    assert deviation(torch.tensor([1.0, -2.2]), one) == pytest.approx(0.1)
    assert deviation(torch.tensor([1.0, torch.nan]), one) == float("inf")
    assert deviation(torch.tensor([torch.inf]), torch.tensor([-torch.inf])) == float("inf")
    assert deviation(torch.tensor([torch.nan]), torch.tensor([torch.nan])) == 0.0
    assert deviation(torch.tensor([1, 2]), torch.tensor([1, 3])) == float("inf")
    assert deviation(one, one[:1]) == float("inf")
    noise = torch.tensor([1e-17])
    assert deviation(noise, -noise, scale=1.0) < tolerance([torch.float64])


def _run(script):
    command = [sys.executable, str(script)]
    return subprocess.run(command, cwd=ROOT, env=_environment(), capture_output=True, text=True, timeout=300)


def _environment():
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), *filter(None, sys.path))), "OMP_NUM_THREADS": "1"}


def test_the_reproducer_runs_without_the_module(tmp_path):
    with gradient_rule("relax.nn.gelu", times(1.5)):
        script = net().save_repro(tmp_path / "repro")
    assert {path.name for path in script.parent.iterdir()} == {
        *("repro.py", "before.relax", "after.relax", "stage.json", "tensors.pt")
    }
    assert "stage 'joint' is the first that deviates" in script.read_text()
    outcome = _run(script)
    # The saved stage has the planted rule in it; the installed code builds the right one.
    assert "stage 'joint' as saved: off by" in outcome.stdout, outcome.stderr
    assert "rebuilt now" in outcome.stdout and "agrees with autograd" in outcome.stdout
    assert outcome.returncode == 0


def test_the_reproducer_still_deviates_with_the_bug_installed(tmp_path):
    with gradient_rule("relax.nn.gelu", times(1.5)):
        script = net().save_repro(tmp_path)
        outcome = replay(script.parent)
    assert outcome.deviates and outcome.as_saved == outcome.rebuilt > 1e-3


@pytest.mark.parametrize("stage", ["spelled", "cleaned", "split backward", "compiled backward"])
def test_a_named_stage_can_be_saved(tmp_path, stage):
    outcome = replay(net(torch.float64).save_repro(tmp_path, stage=stage).parent)
    assert not outcome.deviates and max(outcome.as_saved, outcome.rebuilt) < 1e-9


def test_no_reproducer_of_what_is_not_there(tmp_path):
    lowered = net(torch.float64)
    with pytest.raises(ValueError, match="no stage deviates"):
        lowered.save_repro(tmp_path)
    with pytest.raises(ValueError, match="ATen graph"):
        lowered.save_repro(tmp_path, stage="imported")
    with pytest.raises(ValueError, match="wanted one of"):
        lowered.save_repro(tmp_path, stage="nothing")
