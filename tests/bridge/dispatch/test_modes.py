"""Grad mode and inference mode: the calls that an entry of each serves; adding a call that is served already."""

import copy

import pytest
import torch
from torch import nn

from bridge import UnsupportedModule, add_tvm_dispatch, stats
from tests.bridge.compare import Call, assert_same, run
from tests.bridge.models import MLP

pytestmark = pytest.mark.usefixtures("lowered_once")

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def rows(requires_grad: bool = False) -> torch.Tensor:
    return torch.randn(7, 6, generator=torch.Generator().manual_seed(3)).requires_grad_(requires_grad)


@pytest.fixture
def pair():
    torch.manual_seed(0)
    module = MLP(dropout=0.5)
    return module, copy.deepcopy(module)


def check(module, eager, x):
    assert_same(run(module, Call((x,))), run(eager, Call((x,))), **CLOSE)


@pytest.mark.composes(
    "`no_grad` entries under `inference_mode`; evaluation in a training loop",
    'works; with `on_miss="compile"` by itself',
    section="Guards",
)
def test_an_entry_without_gradients_serves_no_grad_and_inference_mode(pair):
    module, eager = pair
    with torch.no_grad():
        add_tvm_dispatch(module, rows(), on_miss="error")
        check(module, eager, rows())
    with torch.inference_mode():
        made_inside = rows()
        for x in (made_inside, made_inside + 1, rows()):
            check(module, eager, x)
        assert module(made_inside).is_inference()
        assert stats(module).entries[0].guard.check(module, (made_inside,), {}) is not None
    with torch.no_grad():
        check(module, eager, made_inside)
        assert not module(rows()).is_inference()
    assert stats(module).hits == 7


def test_an_entry_can_be_added_in_inference_mode(pair):
    module, eager = pair
    with torch.inference_mode():
        sample = rows()[:1].expand(7, 6)
        add_tvm_dispatch(module, sample, on_miss="error")
        check(module, eager, sample)
    add_tvm_dispatch(module, rows(requires_grad=True), on_miss="error")
    check(module, eager, rows(requires_grad=True))
    assert stats(module).hits == 2 and "forward only" in repr(stats(module).entries[0])


def test_a_frozen_module_needs_one_entry(pair):
    module, eager = pair
    for each in pair:
        each.requires_grad_(False)
    add_tvm_dispatch(module, rows(), on_miss="error")
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            check(module, eager, rows())
    assert stats(module).hits == 3


def test_code_that_asks_for_the_grad_mode_has_an_entry_for_each():
    class Asks(nn.Module):
        def forward(self, x):
            return x * 2 if torch.is_grad_enabled() else x * 3

    module = Asks()
    add_tvm_dispatch(module, rows())
    torch.testing.assert_close(module(rows()), rows() * 2)
    with torch.no_grad():
        torch.testing.assert_close(module(rows()), rows() * 3)
    assert list(stats(module).misses) == ["grad mode: compiled for True, called with False"]
    assert "adds an entry" in repr(stats(module)), "what to do about misses is said where they are read"


class Enables(nn.Module):
    def __init__(self, place):
        super().__init__()
        self.linear, self.place = nn.Linear(6, 6), place

    def forward(self, x):
        with torch.enable_grad():
            y = self.linear(x)
        return y if self.place == "returned" else y * 2


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("place", ["returned", "inside"])
def test_gradients_that_forward_enables_where_they_are_off(place, mode):
    """A call without gradients has no backward: eager runs it if a result requires grad."""
    module = Enables(place)
    with mode():
        if place == "returned":
            with pytest.raises(UnsupportedModule, match="called where gradients are off"):
                add_tvm_dispatch(module, rows())
        add_tvm_dispatch(module)
        assert [module(rows()).requires_grad for _ in range(2)] == 2 * [place == "returned" and mode is torch.no_grad]
        assert stats(module).hits == 2 * (place == "inside")


@pytest.mark.composes("`no_grad` entries under `inference_mode`; evaluation in a training loop")
@pytest.mark.composes("`train()`, `eval()`")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_inside_a_training_loop(pair, mode):
    module, eager = pair
    add_tvm_dispatch(module, rows(requires_grad=True), on_miss="compile")
    for _ in range(2):
        for each in pair:
            each.train()
        check(module, eager, rows(requires_grad=True))
        with mode():
            for each in pair:
                each.eval()
            check(module, eager, rows())
    assert stats(module).hits == 4 and not stats(module).misses
    assert len(stats(module).entries) == 2


def test_tensors_made_in_inference_mode_are_refused_where_gradients_are_wanted(pair):
    module, _ = pair
    with torch.inference_mode():
        sample, inner = rows(), nn.Linear(6, 6)
    with pytest.raises(UnsupportedModule, match="inference_mode"):
        add_tvm_dispatch(module, sample)
    with pytest.raises(UnsupportedModule, match=r"0\.weight.*inference_mode"):
        add_tvm_dispatch(nn.Sequential(inner), rows())


def test_a_call_that_is_served_already_is_not_compiled_again(pair):
    module, _ = pair
    add_tvm_dispatch(module, rows())
    (entry,) = stats(module).entries
    add_tvm_dispatch(module, rows(), on_miss="compile")
    assert stats(module).entries == [entry]
    module(rows()[:5])
    assert stats(module).hits == 1 and entry not in stats(module).entries  # it served no call: one of all sizes does


def test_another_strategy_takes_the_place_of_the_first(pair):
    module, eager = pair
    add_tvm_dispatch(module, rows())
    add_tvm_dispatch(module, rows()[:3])
    add_tvm_dispatch(module, rows(), partition="recompute_all")
    assert [entry.options.partition for entry in stats(module).entries] == ["min_cut", "recompute_all"]
    check(module, eager, rows())
    assert [entry.hits for entry in stats(module).entries] == [0, 1]


def test_a_refused_addition_leaves_the_options(pair):
    module, _ = pair
    add_tvm_dispatch(module, rows())
    with pytest.raises(RuntimeError):
        add_tvm_dispatch(module, rows()[:, :5], on_miss="error")
    module(rows()[:5])  # would raise
    assert sum(stats(module).misses.values()) == 1


@pytest.mark.composes("`register_backward_hook`, the deprecated kind", "eager, with a reason", section="Guards")
def test_a_backward_hook_of_the_deprecated_kind_runs_eager(pair):
    """It is handed the gradients of the last operator's inputs, and the compiled call has no last operator."""
    seen = []
    add_tvm_dispatch(pair[0], rows(requires_grad=True))
    for each in pair:
        each.register_backward_hook(lambda module, inputs, outputs: seen.append([g.shape for g in (*inputs, *outputs)]))
        with pytest.warns(FutureWarning):
            each(rows(requires_grad=True)).sum().backward()
    assert seen[0] == seen[1]
    assert list(stats(pair[0]).misses) == ["backward hook of the deprecated kind: use register_full_backward_hook"]
