"""Every partition strategy through the bridge: equal numbers; masks drawn once; clear errors."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.saved_bytes import saved_for_backward
from bridge import add_tvm_dispatch, lower, stats
from bridge.rng.draws import Draws
from partition import MinCut
from tests.bridge.compare import Call, assert_same, clone_tree, run
from tests.bridge.models import bert_layer
from tests.sampling import sampled

pytestmark = pytest.mark.usefixtures("lowered_once")

BUDGETS = [MinCut(budget=budget, allow_matmul_recompute=True) for budget in (0.8, 0.3, 0.0)]
STRATEGIES = ["save_all", "min_cut", "recompute_all", *BUDGETS, MinCut(budget=0.2)]
FEW = ["save_all", "min_cut", "recompute_all", BUDGETS[1]]


class Fork(nn.Module):
    """An MLP with dropout and two outputs, of which the first is made on the way to the second."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.head = nn.Linear(12, 30), nn.Linear(30, 12), nn.Linear(12, 5)
        self.norm = nn.LayerNorm(12)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.norm(x + F.dropout(self.down(F.gelu(self.up(x))), 0.2, self.training))
        return hidden, torch.softmax(self.head(F.dropout(hidden, 0.4, self.training)), -1)


MODULES = {"BertLayer": (bert_layer, (2, 9, 24)), "Fork": (Fork, (7, 12))}


def make(name: str) -> tuple[nn.Module, Tensor]:
    build, shape = MODULES[name]
    torch.manual_seed(0)
    return build().double().train(), torch.randn(shape, dtype=torch.float64, requires_grad=True)


def dispatched(module: nn.Module, x: Tensor, partition) -> nn.Module:
    return add_tvm_dispatch(copy.deepcopy(module), x, partition=partition, on_miss="error")


def plan_of(module: nn.Module):
    return stats(module).entries[0].plan


def label(strategy) -> str:
    return strategy if isinstance(strategy, str) else strategy.name


@pytest.fixture(scope="module", params=sampled(MODULES, ["Fork"]))
def compiled(request):
    """A module, its input, and a dispatched copy per strategy."""
    module, x = make(request.param)
    return module, x, {label(strategy): dispatched(module, x, strategy) for strategy in STRATEGIES}


def test_same_gradients_and_bitwise_the_same_outputs(compiled):
    module, x, copies = compiled
    call = Call((x,))
    eager = run(module, Call(*clone_tree(((x,), {}))))
    reference = run(copies["save_all"], call)
    for strategy, copied in copies.items():
        found = run(copied, Call(*clone_tree(((x,), {}))))
        assert_same(found, eager)
        assert_same(found, reference)
        for got, wanted in zip(found.outputs, reference.outputs, strict=True):
            assert torch.equal(got, wanted), f"{strategy}: a primary output differs from that of save_all"


def test_the_strategies_differ(compiled):
    """The plans differ, so the comparison means something, and budgets are kept to."""
    _, _, copies = compiled
    plans = {name: plan_of(copied) for name, copied in copies.items()}
    assert plans["recompute_all"].bytes == 0
    flops = [plans[name].cost.flops for name in ("save_all", "min_cut", "recompute_all")]
    assert flops == sorted(set(flops))
    assert plans["min_cut"].bytes < plans["save_all"].bytes
    whole = plans["save_all"].bytes
    for strategy in BUDGETS:
        assert plans[strategy.name].bytes <= strategy.budget * whole
        assert plans[strategy.name].notes == ()
    sizes = [plans[strategy.name].bytes for strategy in BUDGETS]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[1] > sizes[2] == 0


def test_what_is_saved_is_what_the_plan_says(compiled):
    _, x, copies = compiled
    for strategy, copied in copies.items():
        plan = plan_of(copied)
        masks = sum(saved.bytes for saved in plan.free if saved.kind == "mask")
        measured = saved_for_backward(copied, lambda copied=copied: copied(x), x, outputs_free=True)
        assert measured == plan.bytes + masks, strategy


@pytest.mark.parametrize("strategy", sampled(STRATEGIES, FEW), ids=label)
def test_a_gradient_of_one_output_only(strategy):
    """Each pattern of grad_outs has a backward of its own, which reads only the plan's saved tensors."""
    module, x = make("Fork")
    copied = dispatched(module, x, strategy)
    for index in (0, 1):
        gradients = []
        for each in (module, copied):
            torch.manual_seed(3)
            output = each(x)[index]
            wanted = [tensor for tensor in (x, *each.parameters())]
            gradients.append(torch.autograd.grad(output.square().sum(), wanted, allow_unused=True))
        for own, got in zip(*gradients, strict=True):
            assert (own is None) == (got is None)
            if own is not None:
                torch.testing.assert_close(got, own, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("strategy", sampled(STRATEGIES, FEW), ids=label)
def test_masks_are_bytes_and_drawn_once(strategy, monkeypatch):
    module, x = make("BertLayer")
    draws = []
    make_all = Draws.make

    def counting(self: Draws, inputs: Sequence[Tensor]) -> list[Tensor]:
        made = make_all(self, inputs)
        draws.extend(tuple(tensor.shape) for tensor in made)
        return made

    monkeypatch.setattr(Draws, "make", counting)
    copied = dispatched(module, x, strategy)
    draws.clear()
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    torch.manual_seed(5)
    expected = module(x)
    after = torch.get_rng_state()
    torch.manual_seed(5)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = copied(x)
    probabilities, hidden = (2, 3, 9, 9), (2, 9, 24)
    assert draws == [probabilities, hidden, hidden]
    output[0].sum().backward() if isinstance(output, tuple) else output.sum().backward()
    assert len(draws) == 3, "the backward drew a mask again"
    assert torch.equal(torch.get_rng_state(), after), "forward and backward together moved the generator as eager's"

    masks = [tensor for tensor in saved if tensor.dtype == torch.bool]
    assert Counter(tuple(mask.shape) for mask in masks) == Counter(draws)
    assert all(mask.untyped_storage().nbytes() == mask.numel() for mask in masks)
    owned = {tensor.data_ptr() for tensor in copied.parameters()}
    for tensor in saved:
        if tensor.is_floating_point() and tensor.data_ptr() not in owned and tensor.shape in (probabilities, hidden):
            assert len(tensor.unique()) > 2, f"a mask is saved as {tensor.dtype}"
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("strategy", sampled(["min_cut", BUDGETS[1], "save_all"], ["min_cut", BUDGETS[1]]), ids=label)
def test_checkpoint_around_a_dispatched_module(strategy):
    module, x = make("BertLayer")
    copied = dispatched(module, x, strategy)

    def checkpointed(each: nn.Module):
        return lambda *args: checkpoint(each, *args, use_reentrant=False)

    results = {}
    for name, each in (("eager", module), ("dispatched", copied)):
        found = run(each, Call(*clone_tree(((x,), {}))), seed=4)
        with_checkpoint = run(_Wrapped(each, checkpointed(each)), Call(*clone_tree(((x,), {}))), seed=4)
        results[name] = (found, with_checkpoint)
    (plain, _), (ours, ours_checkpointed) = results["eager"], results["dispatched"]
    assert_same(ours, plain)
    for got, wanted in zip(ours_checkpointed.gradients.values(), plain.gradients.values(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-11)
    assert torch.equal(ours_checkpointed.generator, plain.generator)
    assert stats(copied).hits == 3  # plain, under the checkpoint, and again in its backward

    kept = saved_for_backward(copied, lambda: checkpointed(copied)(x), x, outputs_free=True)
    assert kept == 0, "a checkpointed call keeps its input alone"


class _Wrapped(nn.Module):
    """A module called in another way."""

    def __init__(self, inner: nn.Module, call):
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, *args):
        return self.call(*args)


class Stack(nn.Module):
    """Layers in a loop, the last one twice."""

    def __init__(self, layers: list[nn.Module]):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.layers, self.layers[-1]):
            result = layer(x)
            x = result[0] if isinstance(result, tuple) else result
        return x


@pytest.mark.parametrize(
    "strategy", sampled(["min_cut", BUDGETS[1], "recompute_all"], ["min_cut", BUDGETS[1]]), ids=label
)
def test_a_loop_of_layers(strategy):
    torch.manual_seed(0)
    stack = Stack([bert_layer() for _ in range(3)]).double()
    x = torch.randn(2, 9, 24, dtype=torch.float64, requires_grad=True)
    copied = copy.deepcopy(stack)
    for layer in copied.layers:
        add_tvm_dispatch(layer, x, partition=strategy, on_miss="error")
    for seed in (1, 2):
        expected = run(stack, Call(*clone_tree(((x,), {}))), seed=seed)
        assert_same(run(copied, Call(*clone_tree(((x,), {}))), seed=seed), expected)
    assert [stats(layer).hits for layer in copied.layers] == [2, 2, 4]
    with_checkpoints = _Wrapped(copied, lambda value: checkpoint(copied, value, use_reentrant=False))
    found = run(with_checkpoints, Call(*clone_tree(((x,), {}))), seed=2)
    for got, wanted in zip(found.gradients.values(), expected.gradients.values(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-11)


def test_a_budget_out_of_reach_gives_the_best_plan_and_says_so():
    module, x = make("BertLayer")
    copied = dispatched(module, x, MinCut(budget=0.1))
    plan = plan_of(copied)
    (note,) = plan.notes
    found = re.match(r"a budget of [\d,]+ bytes is out of reach: ([\d,]+) bytes is the least", note)
    least = int(found[1].replace(",", ""))
    assert least <= plan.bytes <= 1.01 * least
    assert "matrix product" in note and "allow_matmul_recompute is off" in note
    assert note in plan.table()
    assert plan.bytes <= plan_of(dispatched(module, x, "min_cut")).bytes
    assert_same(run(copied, Call(*clone_tree(((x,), {})))), run(module, Call(*clone_tree(((x,), {})))))


def test_a_policy_that_bans_everything():
    module, x = make("BertLayer")
    refused = lower(module, x, partition=MinCut(policy=lambda node: "recompute")).plan
    assert refused.notes and all("allow_matmul_recompute is off" in note for note in refused.notes)
    assert all("the policy wants" in note and "matrix product" in note for note in refused.notes)
    assert refused.bytes > 0

    allowed = MinCut(policy=lambda node: "recompute", allow_matmul_recompute=True)
    copied = dispatched(module, x, allowed)
    assert plan_of(copied).bytes == 0 and plan_of(copied).notes == ()
    assert_same(run(copied, Call(*clone_tree(((x,), {})))), run(module, Call(*clone_tree(((x,), {})))))


def test_a_policy_that_saves_everything_against_a_budget():
    module, x = make("Fork")
    strategy = MinCut(budget=0, policy=lambda node: "save", allow_matmul_recompute=True)
    plan = lower(module, x, partition=strategy).plan
    assert plan.bytes > 0
    assert "out of reach" in plan.notes[0] and "the policy saves it" in plan.notes[0]


@pytest.mark.parametrize(
    ("strategy", "error", "message"),
    [
        ("best", ValueError, 'unknown partition strategy "best"; choose "min_cut"'),
        (7, TypeError, "a partition strategy is a name or an object with a choose method, got 7"),
        (MinCut(policy=lambda node: "keep"), ValueError, "the policy answered 'keep' for"),
    ],
    ids=["name", "type", "policy"],
)
def test_wrong_requests_leave_the_module_alone(strategy, error, message):
    module, x = make("Fork")
    with pytest.raises(error, match=message):
        add_tvm_dispatch(module, x, partition=strategy)
    assert module._compiled_call_impl is None


def test_wrong_budgets():
    with pytest.raises(ValueError, match="budget must not be negative, got -1"):
        MinCut(budget=-1)
    with pytest.raises(TypeError, match=r"fraction \(float\) or bytes \(int\), got 'half'"):
        MinCut(budget="half")
    with pytest.raises(TypeError, match="policy is a callable"):
        MinCut(policy="save")
