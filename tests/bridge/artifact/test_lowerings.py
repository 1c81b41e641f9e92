"""Lowerings on disk: used where the runs of the module have the same record and its code is the same."""

from __future__ import annotations

import importlib
import os
import sys
from functools import partial

import pytest
import torch
from torch import fx, nn

import bridge
from bridge import cache
from bridge.artifact import NoFormError, current_store
from bridge.aten import Imported
from bridge.base.devices import working_for
from bridge.capture import Captured, Draw, DropoutOperand, Observation, Output, captured
from bridge.compile import pipeline
from bridge.lowering import LoweredCall
from bridge.lowering.record import graph_of, record_of
from bridge.lowering.reuse import NotCanonicalError, canonical, code_digest
from tests.bridge.artifact.count_builds import captures, digest, in_children
from tests.sampling import sampled

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="POSIX")


class Outputs(nn.Module):
    """Two outputs, a mask, a buffer that changes, a tensor literal, a result that is a view of an argument."""

    def __init__(self, p=0.25):
        super().__init__()
        self.linear, self.batch, self.p = nn.Linear(12, 12), nn.BatchNorm1d(12), p

    def forward(self, x, *, scale=2.0):
        hidden = self.batch(self.linear(x))
        hidden = nn.functional.dropout(hidden, self.p, self.training) + torch.tensor([1.0, -0.0, 2.0]).repeat(4)
        return {"loss": (hidden * scale).square().mean(), "hidden": hidden.tanh(), "x": x.view(-1), "n": x.shape[0]}


PATTERNS = (("loss",), ("hidden",), ("loss", "hidden"))


def ran(p=0.25, grad=True, patterns=PATTERNS):
    """The count of captures, the bits of a training step for each pattern of grad_outs, and the text of explain."""
    torch.manual_seed(0)
    module, x = Outputs(p), torch.randn(10, 12)
    found = []
    with torch.set_grad_enabled(grad), captures() as captured:
        bridge.add_tvm_dispatch(module, x)
        for wanted in patterns if grad else ():
            result = module(x)
            assert result["x"].data_ptr() == x.data_ptr() and result["n"] == 10
            sum(result[name].sum() for name in wanted).backward()
            found += [*(each for each in result.values() if isinstance(each, torch.Tensor)), *module.buffers()]
        found += [module(x)["hidden"], *(each.grad for each in module.parameters() if grad)]
    entry = bridge.stats(module).entries[0]
    text = str(bridge.explain(module, full=True))
    timed = (" s)", "second", " ms", "seconds", " s,")
    steps = [line for line in text.splitlines() if not any(word in line for word in timed)]
    lines = [stage.script().partition("\n")[2] for stage in entry.lowered]
    return {
        "captured": len(captured),
        "bits": digest(each.detach() for each in found),
        "hits": bridge.stats(module).hits,
        "explained": digest([torch.frombuffer(bytearray("\n".join(steps).encode()), dtype=torch.uint8)]),
        "stages": digest([torch.frombuffer(bytearray("\n".join(lines).encode()), dtype=torch.uint8)]),
    }


def same(results):
    return len({tuple(each[name] for name in ("bits", "hits", "explained", "stages")) for each in results}) == 1


def test_a_later_process_captures_nothing_and_computes_the_same_bits(used_cache):
    results = [*in_children(1, ran), *in_children(1, ran)]
    assert [each["captured"] for each in results] == [1, 0] and results[0]["hits"] == 4
    assert same(results)
    (other,) = in_children(1, lambda: ran(p=0.3, patterns=PATTERNS[:1]))
    assert other["captured"] == 1, "another probability is another operator"
    (forward,) = in_children(1, lambda: ran(grad=False))
    assert forward["captured"] == 1
    for kind in sorted({path.parent.parent.name for path in current_store().files()}):
        for path in current_store().files():
            if path.parent.parent.name == kind:
                content = bytearray(path.read_bytes())
                content[-1] ^= 1
                path.write_bytes(content)
    (again,) = in_children(1, ran)
    assert again["captured"] == 1 and same([results[0], again])


class Asking(nn.Module):
    """Drops in eager alone, as attention that leaves out its mask there."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(12, 12, dtype=torch.float64)

    def forward(self, x):
        hidden = self.linear(x)
        return hidden if torch.compiler.is_compiling() else nn.functional.dropout(hidden, 0.3, self.training).sin()


class Looping(nn.Module):
    """Steps with dropout and with numbers of each step."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(12, 12, dtype=torch.float64)

    def forward(self, x):
        state = x[0]
        for step, part in enumerate(x):
            state = torch.tanh(self.linear(nn.functional.dropout(state, 0.3, self.training)) + part * (0.1 * step))
        return state


class Reading(nn.Module):
    """Reads a number of the argument, one of a parameter, and the size of a result."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(12, 12, dtype=torch.float64)

    def forward(self, x):
        hidden = self.linear(x[(x[:, 0] > -9).nonzero().squeeze(-1)])
        hidden = hidden.sin() if (x > -8).all() else hidden.cos()
        hidden = hidden * 2 if self.linear.weight[0, 0] > -1 else hidden
        return nn.functional.dropout(hidden, 0.3, self.training)


class AskingAndReading(Asking):
    """Branches on numbers in eager alone, as transformers do about a mask that hides nothing."""

    def forward(self, x):
        hidden = super().forward(x)
        return hidden if torch.compiler.is_compiling() or not (x > -8).all() else hidden.cos()


def asked(make=Asking):
    """How often it was captured, and whether a step is eager's, masks included."""
    torch.manual_seed(0)
    module, x = make(), torch.randn(10, 12, dtype=torch.float64)
    found = []
    for dispatched in (False, True):
        if dispatched:
            with captures() as captured:
                bridge.add_tvm_dispatch(module, x)
        torch.manual_seed(1)
        module.zero_grad()
        result = module(x)
        result.square().sum().backward()
        found.append([result.detach(), torch.rand(2), *(each.grad.clone() for each in module.parameters())])
    same = all(torch.allclose(one, other, rtol=1e-12) for one, other in zip(*found, strict=True))
    (entry,) = bridge.stats(module).entries
    call = entry.lowered.captured
    told = {"loops": call.loop.is_recorded, "readings": len(call.numbers.guards)}
    return {"captured": len(captured), "same": same, "hits": bridge.stats(module).hits, **told}


@pytest.mark.parametrize("make", sampled([Asking, Looping, Reading, AskingAndReading], [AskingAndReading]))
def test_what_the_runs_did_is_found_in_a_pack(used_cache, monkeypatch, tmp_path, make):
    """By operators in eager's branches, one step of each loop, or numbers that it reads, on another machine."""
    monkeypatch.setattr("bridge.capture.loops.rolled.LEAST_ROWS", 1)
    found = in_children(1, partial(asked, make))
    assert cache.main(["pack", make.__name__, str(tmp_path / "file")]) == 0
    monkeypatch.setenv("BRIDGE_CACHE_DIR", str(tmp_path / "other"))
    assert cache.main(["unpack", str(tmp_path / "file")]) == 0
    found += in_children(1, partial(asked, make))
    how = {"loops": make is Looping}
    how["readings"] = {Reading: 3, AskingAndReading: 1}.get(make, 0)
    assert found == [{"captured": captured, "same": True, "hits": 1, **how} for captured in (1, 0)]


class Branches(nn.Module):
    """Branches on a number of an argument and on one of a parameter."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), weight))

    def forward(self, x):
        return (x * self.weight).sin() if (x > 0).all() and self.weight.sum() > 0 else (x * self.weight).cos()


def branched(weight, first, second):
    """How often it was captured for ``first``; hits, and reasons of misses, of two calls and one of other weights."""
    module = Branches(weight)
    with captures() as captured:
        bridge.add_tvm_dispatch(module, torch.full((3,), first))
    plain = Branches(weight)
    for number in (first, second):
        x = torch.full((3,), number)
        assert torch.allclose(module(x), plain(x), rtol=1e-6)
    with torch.no_grad():
        module.weight.neg_()
        plain.weight.neg_()
    assert torch.allclose(module(torch.full((3,), first)), plain(torch.full((3,), first)), rtol=1e-6)
    counts = bridge.stats(module)
    return len(captured), counts.hits, len(counts.misses)


def test_numbers_that_are_read_are_part_of_the_key(used_cache):
    """Another number is captured anew; a lowering from disk serves only its own branch."""
    made = [(1.0, 2.0, -2.0), (-1.0, 2.0, -2.0), (1.0, -2.0, 2.0)]
    found = [in_children(1, partial(branched, *each))[0] for each in made + made]
    assert [captured for captured, *_ in found] == [1, 1, 1, 0, 0, 0]
    assert found[3:] == [[0, *rest] for _, *rest in found[:3]] and found[0][1] == 1


def test_what_is_pruned_costs_a_compilation(used_cache):
    def step():
        return ran(patterns=PATTERNS[2:])

    (first,) = in_children(1, step)
    for kind in ("kernel", "library", "program", "lowering"):
        for path in current_store().files():
            if path.parent.parent.name == kind:
                path.unlink()
        (again,) = in_children(1, step)
        assert same([first, again]) and again["captured"] == (kind == "lowering")


def test_code_and_attributes_are_part_of_the_key(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "helped_by.py").write_text("def helper(x):\n    return x\n")
    model = "from torch import nn\nfrom helped_by import helper\nclass M(nn.Module):\n    size = 3\n"
    (tmp_path / "a_model.py").write_text(model)

    def digest_now():
        for name in ("a_model", "helped_by"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        made = importlib.import_module("a_model").M()
        return made, code_digest(made)

    made, first = digest_now()
    assert first == digest_now()[1] is not None
    made.rate = 0.5
    changed = code_digest(made)
    assert changed != first
    made.eval()
    assert code_digest(made) not in (first, changed)
    (tmp_path / "helped_by.py").write_text("def helper(x):\n    return x + 1\n")
    assert digest_now()[1] != first, "a helper in another file"
    scope = {"__name__": "no_such_file"}
    exec("from torch import nn\nclass N(nn.Module): pass", scope)
    assert code_digest(scope["N"]()) is None
    for name in ("a_model", "helped_by"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    "module",
    [
        *(Outputs(), nn.LSTM(12, 5)),
        pytest.param(nn.TransformerEncoderLayer(12, 2, 24, batch_first=True), marks=pytest.mark.sweep),
    ],
)
def test_graphs_are_written_down(module):
    x = torch.randn(6, 12) if isinstance(module, Outputs) else torch.randn(4, 6, 12)
    graph = bridge.lower(module, x).captured.graph
    record = record_of(graph)
    again = graph_of(record)
    assert record_of(again) == record and str(again) == str(graph)


def test_graphs_with_other_things_are_not():
    graph = torch.fx.Graph()
    graph.call_function(len, ([],))
    with pytest.raises(NoFormError, match="len"):
        record_of(graph)


class Refusing(list):
    def __iter__(self):
        raise NotImplementedError


def test_what_has_no_name_in_another_process_is_no_key():
    assert canonical((nn.Linear, torch.float32, {"a": (1, 1.0)})) == canonical(
        (nn.Linear, torch.float32, {"a": (1, 1.0)})
    )
    assert canonical(Refusing([1])) == ["Refusing", 1]  # as it is stored
    assert canonical((1,)) != canonical([1]) and canonical(torch.Size([1])) != canonical((1,))
    for value in (object(), lambda: 1, torch.ones(1)):
        with pytest.raises(NotCanonicalError):
            canonical((value,))


def test_records_know_every_field():
    """A new field has to be serialized, or to come from the runs of the call at hand."""
    known = {
        Captured: "module_name graph names module_tensors given results mutated observation state numbers read sizes "
        "device loop",
        captured.CapturedArguments: "tensors leaves is_tensor spec followed",
        captured.CapturedNames: "placeholders draws literals",
        captured.CapturedNumbers: "guards expressions by_draws",
        captured.CapturedSizes: "scope shapes strides lines counted",
        captured.CapturedLoop: "is_recorded recording any_length",
        captured.CapturedState: "counters kept",
        Imported: "function output_of num_outputs dropout_draws input_draws leaves_state checks",
        LoweredCall: "captured imported wanted differentiable stages partitioned seconds sample content",
        Draw: "op shape stride dtype args kwargs device operand advance steps",
        DropoutOperand: "dtype stride offset of",
        Output: "value is_tensor alias_of is_same_object shape stride offset dtype is_conjugate requires_grad reaches "
        "through is_saved is_held",
        Observation: "outputs out_spec draws unsupported differentiates derived reads_validation objects "
        "counted saved saved_views overwritten checkpointed reads",
    }
    assert {kind: " ".join(kind.__annotations__) for kind in known} == known


def test_a_record_made_on_one_gpu_is_read_on_another():
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(2, device="meta")
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    for device in (first, second, torch.device("cpu")):
        graph.call_function(torch.ops.aten.ones.default, ([2],), {"device": device})
    with working_for(first):
        record, key = record_of(graph), canonical((first, torch.device("cpu")))
    with working_for(second):
        devices = [node.kwargs["device"] for node in graph_of(record).nodes if node.kwargs]
        assert devices == [second, second, torch.device("cpu")]
        assert canonical((second, torch.device("cpu"))) == key != canonical((first, torch.device("cpu")))


class Shifted(nn.Module):
    """Its backward is the same with a shift and without one."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, x, shift=None):
        hidden = self.linear(x.sin())
        return hidden if shift is None else hidden + shift


def translations():
    """How many functions become loop graphs where a module is called in both ways."""
    translate, translated = pipeline.translate, []
    pipeline.translate = lambda *args: translated.append(1) or translate(*args)
    torch.manual_seed(0)
    modules, x = [Shifted(), Shifted()], torch.randn(10, 12)
    for module, args in zip(modules, [(x,), (x, torch.ones(12))], strict=True):
        bridge.add_tvm_dispatch(module, args)
        module(*args).sum().backward()
        assert bridge.stats(module).hits == 1
    pipeline.translate = translate
    return len(translated)


def test_a_program_of_two_lowerings_is_found_by_both(used_cache):
    """The second one shares it in the first process, and has it from the disk in a later one."""
    assert [in_children(1, translations)[0] for _ in range(2)] == [3, 0]


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sign()

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


class Binary(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(StraightThrough.apply(self.linear(x)) * x)


def penalized():
    torch.manual_seed(0)
    module, x = Binary(), torch.randn(3, 4, requires_grad=True)
    with captures() as captured:
        bridge.add_tvm_dispatch(module, x)
    (slope,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
    slope.square().sum().backward()
    return {"captured": len(captured), "bits": digest(each.grad for each in (x, module.linear.weight))}


def test_second_derivatives_of_own_functions_are_found_too(used_cache):
    results = [*in_children(1, penalized), *in_children(1, penalized)]
    assert [each["captured"] for each in results] == [1, 0] and results[0]["bits"] == results[1]["bits"]
