"""The protocol of a capture: how often it runs forward, and how often it takes and puts back the module's state."""

import ast
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

import bridge
from bridge import UnsupportedModule
from bridge.capture import capture, dynamic_dims
from bridge.capture.passes import alias_analysis, stop_gradient
from bridge.capture.twin import Twin
from bridge.guards import Snapshot
from bridge.state import SampleCall
from tests.bridge.models import bert_layer
from tests.corpus.forwards import counted

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.calls, self.width = 0, None

    def forward(self, x):
        return torch.dropout(torch.relu(self.norm(self.linear(x))), 0.1, True)


class Counts(Plain):
    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class Settles(Plain):
    def forward(self, x):
        self.width = x.shape[1]
        return self.linear(x) * self.width


class Reads(Plain):
    def forward(self, x):
        return self.linear(x) if bool(x.sum() > 0) else -self.linear(x)


class Changes(Plain):
    def forward(self, x):
        self.width = float(self.width or 1) * 2
        return self.linear(x) * self.width


class Asks(Plain):
    def forward(self, x):
        return self.linear(x) * (2 if torch.compiler.is_compiling() else 1)


@pytest.fixture
def states(monkeypatch) -> Counter:
    """Counts of snapshots of the state, and of restorations."""
    found: Counter[str] = Counter()
    made, restore = Snapshot.__init__, Snapshot.restore
    monkeypatch.setattr(Snapshot, "__init__", lambda self, root: found.update(["taken"]) or made(self, root))
    monkeypatch.setattr(Snapshot, "restore", lambda self: found.update(["put back"]) or restore(self))
    return found


RUNS = {Plain: 2, Counts: 2, Settles: 3, Reads: 2, Asks: 2}


@pytest.mark.parametrize("kind", RUNS, ids=lambda kind: kind.__name__)
def test_forward_runs_twice_and_once_more_where_state_settles(kind, states):
    module = kind()
    with counted(module) as forwards:
        capture(SampleCall(module, (X,), {}))
    assert forwards.count == RUNS[kind]
    assert states["taken"] <= 2 and states["put back"] <= 2


def test_with_sizes_that_vary(states):
    module = Plain()
    dims = dynamic_dims(SampleCall(module, (X,), {}), ({0: torch.export.Dim.DYNAMIC},))
    with counted(module) as forwards:
        captured = capture(SampleCall(module, (X,), {}, dims))
    assert captured.sizes.scope is not None
    assert forwards.count <= 3
    assert states["taken"] <= 2 and states["put back"] <= 2


def test_what_changes_at_every_call_is_refused_after_two_runs(states):
    module = Changes()
    with counted(module) as forwards, pytest.raises(UnsupportedModule, match="at every call"):
        capture(SampleCall(module, (X,), {}))
    assert forwards.count == 2 and module.width is None
    assert states["taken"] <= 2 and states["put back"] <= 2


def test_the_module_is_untouched_while_it_is_captured():
    """Other threads find the module's own tensors, attributes and hooks: forward runs on a twin."""
    seen = []

    class Looks(Plain):
        def forward(self, x):
            seen.append((vars(module)["linear"] if "linear" in vars(module) else module.linear) is self.linear)
            return super().forward(x)

    module = Looks()
    before = {name: tensor for name, tensor in module.state_dict(keep_vars=True).items()}
    values = {name: tensor.detach().clone() for name, tensor in before.items()}
    capture(SampleCall(module, (X,), {}))
    assert not any(seen), "forward runs on the module itself"
    for name, tensor in module.state_dict(keep_vars=True).items():
        assert tensor is before[name] and torch.equal(tensor, values[name]) and tensor.grad is None


ROOT = Path(bridge.__file__).parent
CALLS = [
    node
    for room in ("base", "capture")
    for path in sorted((ROOT / room).rglob("*.py"))
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("replaced", "replaced_here")
]


def test_docs_list_each_name_that_a_capture_replaces():
    names = {each.arg for call in CALLS for each in call.keywords if each.arg is not None}
    listed = of_docs("## Patches of torch")
    assert len(names) >= 6 and [each for each in sorted(names) if each not in listed] == []


def of_docs(title):
    return (ROOT.parent / "docs" / "capture.md").read_text().partition(title)[2].partition("\n## ")[0]


def test_a_capture_has_four_modes_and_docs_list_them():
    made = [
        node.name
        for path in sorted((ROOT / "capture").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith("Mode") for base in node.bases)
    ]
    listed = of_docs("## Modes")
    assert len(made) == 4 and [each for each in made if f"`{each}`" not in listed] == []


class Loud:
    def __getattribute__(self, name):
        raise RuntimeError(f"asked for {name}")


def test_a_twin_is_made_without_running_code_of_the_objects_that_it_shares():
    module = Plain()
    module.held = [Loud()]
    twin = Twin(module, torch.clone).module
    assert twin is not module and twin.held[0] is module.held[0]


def test_the_name_of_a_temporary_file_is_no_draw():
    class Names(Plain):
        def forward(self, x):
            tempfile.NamedTemporaryFile().close()
            return super().forward(x)

    assert len(capture(SampleCall(Names(), (X,), {})).draws) == 1, "the dropout's alone"


@pytest.mark.parametrize("generator", [torch.default_generator, torch.Generator()], ids=("default", "own"))
def test_a_generator_that_forward_seeds_is_put_back(generator):
    class Seeds(Plain):
        def forward(self, x):
            generator.manual_seed(7)
            return super().forward(x)

    module, before = Seeds(), generator.get_state()
    with pytest.raises(UnsupportedModule, match="changes a random generator inside forward"):
        capture(SampleCall(module, (X,), {}))
    assert torch.equal(generator.get_state(), before)


def test_a_bert_layer_runs_twice():
    module = bert_layer()
    hidden = torch.randn(2, 14, 24)
    with counted(module) as forwards:
        capture(SampleCall(module, (hidden,), {}))
    assert forwards.count == 2


def _looks_per_layer(monkeypatch, layers: int) -> float:
    """Calls of ``written`` (an operator's written arguments) per layer in a capture of so many layers."""
    looks, written = Counter(), alias_analysis.written

    def counting(node):
        looks["asked"] += 1
        return written(node)

    for each in (alias_analysis, stop_gradient):
        monkeypatch.setattr(each, "written", counting)
    module = nn.Sequential(*[nn.Linear(8, 8) for _ in range(layers)])
    capture(SampleCall(module, (X,), {}))
    monkeypatch.undo()
    return looks["asked"] / layers


def test_aliases_of_a_deep_module_are_analysed_in_time_that_grows_with_its_rows(monkeypatch):
    assert _looks_per_layer(monkeypatch, 48) < 1.2 * _looks_per_layer(monkeypatch, 6)
