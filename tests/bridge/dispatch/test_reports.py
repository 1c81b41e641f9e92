"""Texts that a new user reads: for a wrong sample, a refused call, an entry, a compiled module."""

import logging
import sys

import pytest
import torch
from torch import nn

from bridge import UnsupportedModule, add_tvm_dispatch, examine, explain, stats
from tests.device import DEVICE


class Net(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function

    def forward(self, x):
        return self.function(self, x)


def rows() -> torch.Tensor:
    return torch.randn(3, 4)


def picks(m, x):
    h = m.linear(x)
    return m.linear(h[h.sum(1) > 0])


@pytest.mark.parametrize("count", [2, 3])
def test_positional_arguments_of_a_sample_are_told_to_be_a_tuple(count):
    with pytest.raises(TypeError, match=rf"{count} arguments want a tuple, add_tvm_dispatch\(module, \(x, y\)\)"):
        add_tvm_dispatch(nn.Bilinear(4, 4, 2), *[rows()] * count)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes")
@pytest.mark.parametrize("look", [add_tvm_dispatch, examine])
@pytest.mark.parametrize("sample", [torch.ones(3, 5), torch.ones(3, 4, dtype=torch.long)], ids=["shape", "type"])
def test_an_error_of_eagers_says_that_it_is_about_the_sample(look, sample):
    with pytest.raises(RuntimeError, match="mat1 and mat2") as raised:
        look(nn.Linear(4, 4), sample)
    assert raised.value.__notes__ == ["PyTorch raises this for the sample that was given, with or without a dispatch"]


class Alone(nn.Module):
    """A module without modules inside."""

    def forward(self, x):
        return x.unique()


@pytest.mark.parametrize(("module", "whole"), [(Alone(), None), (Alone(), False), (nn.Sequential(Alone()), False)])
def test_parts_are_not_offered_where_there_are_none(module, whole):
    with pytest.raises(UnsupportedModule, match="keep the shape") as refused:
        add_tvm_dispatch(module, rows(), whole=whole)
    assert "whole=False" not in str(refused.value) and not refused.value.ops[0].hint.endswith(",")


def test_a_submodule_is_not_offered_where_there_is_none():
    class Runs(nn.Module):
        def forward(self, x):
            x.sum().backward()
            return x

    with pytest.raises(UnsupportedModule, match="\n    leave this module to PyTorch"):
        add_tvm_dispatch(Runs(), rows().requires_grad_())


@pytest.mark.parametrize("function", [lambda m, x: m.linear(x).unique(), picks], ids=["unique", "mask"])
def test_a_shape_that_parameters_decide_is_refused_once_and_parts_are_offered(function, caplog):
    with pytest.raises(UnsupportedModule, match="or dispatch the rest: whole=False"):
        add_tvm_dispatch(Net(function), rows())
    assert "the shape of a result depends on" in str(examine(Net(function), rows()))
    module, calls = add_tvm_dispatch(Net(function)), []
    module.linear.register_forward_hook(lambda *_: calls.append(1))
    with caplog.at_level(logging.WARNING, "bridge"):
        for _ in range(5):
            module(rows())
    assert len([each for each in caplog.records if "runs eager from now on" in each.getMessage()]) == 1
    once = len(calls)
    module(rows())
    assert len(calls) - once == (2 if function is picks else 1), "a call that was refused is not captured again"
    assert "the shape of a result depends on" in repr(stats(module)), (
        "stats has the reason, not only that there is none"
    )


def test_operations_that_are_supported_are_no_contradiction_to_a_refusal():
    assert "each of them supported; the whole is not\nin the way:" in str(examine(Net(picks), rows()))
    assert "100%" not in str(examine(Net(picks), rows()))


def test_an_entry_says_whether_it_has_a_backward_not_in_which_mode_it_was_made():
    module = add_tvm_dispatch(Net(lambda m, x: m.linear(x)).eval(), rows())
    assert "forward and backward" in repr(stats(module)) and "training" not in repr(stats(module))
    with torch.no_grad():
        module = add_tvm_dispatch(Net(lambda m, x: m.linear(x)).eval(), rows())
    assert "forward only" in repr(stats(module))


def test_advice_does_not_repeat_what_is_set():
    module = add_tvm_dispatch(Net(lambda m, x: sum(m.linear(x).unbind(0))), rows(), on_miss="compile")
    module(torch.randn(5, 4))
    module.train(False)
    assert 'as on_miss="compile" does' not in repr(stats(module))


def test_stats_of_what_torch_compile_has_made_names_its_graphs():
    compiled = torch.compile(nn.Linear(4, 4), backend="tvm_dispatch")
    with pytest.raises(ValueError, match=r"torch.compile made it; bridge.dynamo.graphs\(\)"):
        stats(compiled)


def test_a_call_that_is_compiled_for_long_is_told_once(caplog, monkeypatch):
    monkeypatch.setattr("bridge.dispatch.dispatcher.LONG_COMPILATION", 0)
    module = add_tvm_dispatch(Net(lambda m, x: m.linear(x)))
    for count in (3, 5, 1):
        module(torch.randn(count, 4))
    told = [each.getMessage() for each in caplog.records if " s to compile: " in each.getMessage()]
    assert told == ["Net: a call took 0 s to compile: no entry: training, grad mode, args[0] a Tensor"]


def test_a_report_names_a_kernel_whose_source_there_is():
    module = add_tvm_dispatch(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)), torch.randn(8, 64))
    report = explain(module)
    (line,) = [line for line in str(report).splitlines() if line.startswith("everything: print(report.full)")]
    assert "def " in eval(line.partition("a kernel: ")[2])
    form = "llvm" if DEVICE.type == "cpu" else "cuda"
    assert "k1" in report.entries[0].programs[0].source("k1", form)
