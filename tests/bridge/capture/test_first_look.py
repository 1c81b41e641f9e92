"""A look at forward on fake tensors tells in which branches it is traced, and what is observed of it, once."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import nn

from bridge import add_tvm_dispatch, stats
from bridge.capture import capture, fake_run
from bridge.capture.eager_run import real_run
from bridge.capture.exported import export
from bridge.capture.tracing import takes_eagers_branches


class Attends(nn.Module):
    """Makes a mask of ones where it is traced, as transformers does."""

    def forward(self, x, kept=None):
        needless = not torch.compiler.is_exporting() and (kept is None or kept.all())
        mask = None if needless else x.new_ones(1, 1, 5, 5, dtype=torch.bool)
        return nn.functional.scaled_dot_product_attention(x, x, x, mask)


def makes_ones(captured):
    return any("full" in str(node.target) for node in captured.graph.nodes)


def test_attention_is_traced_with_eagers_arguments():
    """With a mask, a GPU takes another kernel. Where numbers decide about it, one entry serves all of them."""
    x = torch.randn(1, 2, 5, 8).requires_grad_()
    captured = capture(Attends(), (x,), {})
    assert captured.as_eager and not makes_ones(captured)
    captured = capture(Attends(), (x, torch.ones(5, dtype=torch.bool)), {})
    assert not captured.as_eager and makes_ones(captured)


@pytest.mark.parametrize("padded", [False, True])
def test_attention_that_drops_inside_of_a_kernel_is_traced_in_eagers_branches_at_once(padded, monkeypatch):
    """As numbers choose its kernel there, which refuses the other trace: it is not made to its end."""
    monkeypatch.setattr("bridge.capture.first_look._drops_inside", lambda *args, **kwargs: True)
    monkeypatch.setattr("bridge.capture.pipeline._FIRST_ATTENTION", WeakKeyDictionary())
    ran = []
    monkeypatch.setattr(
        "bridge.capture.pipeline.real_run", lambda *args, **rest: ran.append(1) or real_run(*args, **rest)
    )
    kept = torch.ones(5, dtype=torch.bool)
    kept[0] = not padded
    captured = capture(Attends(), (torch.randn(1, 2, 5, 8).requires_grad_(), kept), {})
    assert captured.as_eager and [reading.value for reading in captured.readings] == [not padded]
    assert len(ran) == 1 and makes_ones(captured) == padded


class AttendsAlike(nn.Module):
    """Asks, and gives attention the same whatever the answer is."""

    def forward(self, x):
        scale = 0.5 if torch.compiler.is_exporting() else 1 / 2
        return nn.functional.scaled_dot_product_attention(x, x, x, scale=scale)


class AttendsUnasked(nn.Module):
    def forward(self, x):
        return nn.functional.scaled_dot_product_attention(x, x, x)


@pytest.fixture
def traces(monkeypatch):
    """How often it is exported, and the branches of each run on fake tensors."""
    monkeypatch.setattr("bridge.capture.pipeline._FIRST_ATTENTION", WeakKeyDictionary())
    seen = {"exports": 0, "runs": []}

    def exported(*args):
        seen["exports"] += 1
        return export(*args)

    def ran(*args, **rest):
        seen["runs"].append("eager's" if takes_eagers_branches() else "traced")
        return fake_run(*args, **rest)

    monkeypatch.setattr("bridge.capture.traced.export", exported)
    monkeypatch.setattr("bridge.capture.first_look.fake_run", ran)
    return seen


@pytest.mark.parametrize(
    ("module", "runs", "later"),
    [
        (Attends(), ["traced", "eager's"], ["eager's"]),
        (AttendsAlike(), ["traced", "eager's", "traced"], ["traced"]),
        (AttendsUnasked(), ["traced"], ["traced"]),
    ],
    ids=["another", "the same", "unasked"],
)
def test_forward_is_exported_once_and_observed_by_the_last_run(module, runs, later, traces):
    for expected in (runs, later):  # the second call is taken to be like the first one
        traces.update(exports=0, runs=[])
        captured = capture(module, (torch.randn(1, 2, 5, 8),), {})
        assert traces == {"exports": 1, "runs": expected} and captured.as_eager == isinstance(module, Attends)


class Calls(nn.Module):
    def __init__(self, function: Callable):
        super().__init__()
        self.function, self.shift, self.size, self.problem = function, torch.ones(4), 0, None

    def forward(self, x):
        return nn.functional.dropout(self.function(self, x), 0.5)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3


def sets_problem(module, x):
    """As transformers' classifiers, of their labels."""
    module.problem = module.problem or "regression"
    return x * len(module.problem)


def sets_size(module, x):
    module.size = module.size or len(x)
    return x * module.size


@pytest.mark.parametrize(
    ("function", "runs", "exports"),
    [
        (lambda module, x: x.sin(), 1, 1),
        (lambda module, x: x + module.shift, 2, 1),
        (lambda module, x: Doubled.apply(x), 2, 1),
        (sets_problem, 2, 1),
        (sets_size, 3, 2),
        (lambda module, x: x if x.sum() > 0 else -x, 2, 2),
    ],
    ids=["plain", "attribute", "Function", "sets", "may count", "number"],
)
def test_it_is_observed_again_where_the_first_run_does_not_tell_all(function, runs, exports, traces):
    """A tensor that is registered nowhere, a Function with its own backward, a first call that is another one (which is
    not traced, unless it may be counting), a number that is read."""
    module, x = Calls(function), torch.randn(3, 4, requires_grad=True)
    twin = copy.deepcopy(module)
    add_tvm_dispatch(module, x)
    assert len(traces["runs"]) == runs and traces["exports"] == exports
    results = []
    for each in (module, twin):
        torch.manual_seed(3)
        result = each(x)
        results.append((result, *torch.autograd.grad(result.sum(), x)))
    torch.testing.assert_close(*results)
    assert stats(module).hits == 1


@pytest.mark.usefixtures("traces")
def test_a_look_that_ends_early_keeps_no_reference_to_parameters():
    """``swap_tensors``, which ``.to()`` can be told to use, refuses tensors of which there are weak references."""
    module = nn.Sequential(nn.Linear(8, 8), Attends())
    gc.disable()
    try:
        captured = capture(module, (torch.randn(1, 2, 5, 8),), {})
        torch.utils.swap_tensors(module[0].weight, nn.Parameter(torch.zeros(8, 8)))
    finally:
        gc.enable()
    assert captured.as_eager and not module[0].weight.any()
