"""``torch.utils.checkpoint`` around dispatched modules: reentrant or not, one module or each layer of a loop."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import (
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from benchmarks.saved_bytes import saved_for_backward
from bridge import UnsupportedModule, add_tvm_dispatch, stats

KINDS = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])


class Block(nn.Module):
    """A residual block with dropout: a checkpoint's second run has to draw the same mask."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.3, self.training)


def blocks(count: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(count))).double().train()


def example() -> Tensor:
    return torch.randn(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def dispatched(layers: nn.Sequential, x: Tensor, partition="min_cut") -> nn.Sequential:
    layers = copy.deepcopy(layers)
    for layer in layers:
        add_tvm_dispatch(layer, x.detach().requires_grad_(), partition=partition, on_miss="error")
    return layers


def step(layers: nn.Sequential, call: Callable, seed: int) -> dict[str, Tensor]:
    """Result, gradients and the generator's state after a step."""
    torch.manual_seed(seed)
    x = example().requires_grad_()
    layers.zero_grad()
    y = call(layers, x)
    y.square().sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in layers.named_parameters()}
    return {"y": y.detach(), "x": x.grad, **gradients, "generator": torch.get_rng_state()}


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert torch.equal(found.pop("generator"), wanted["generator"])
    for name, value in found.items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-10, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.composes(
    "`torch.utils.checkpoint`",
    "works around dispatched modules, in a loop too; inside one: refused if reentrant or if run otherwise again",
    section="Autograd, memory, threads",
)
@KINDS
def test_around_a_module(reentrant):
    layers = blocks(1)
    ours = dispatched(layers, example())

    def call(each: nn.Sequential, x: Tensor) -> Tensor:
        return checkpoint(each[0], x, use_reentrant=reentrant)

    wanted = step(layers, call, seed=3)
    # A reentrant checkpoint runs without gradients first: that call is another one, and has an entry of its own.
    with torch.no_grad():
        add_tvm_dispatch(ours[0], example().requires_grad_(), on_miss="error")
    assert_equal(step(ours, call, seed=3), dict(wanted))
    assert stats(ours[0]).hits == 2 and not stats(ours[0]).misses
    assert_equal(step(ours, call, seed=3), step(layers, lambda each, x: each(x), seed=3))


@KINDS
def test_a_first_call_without_gradients_may_run_eager(reentrant):
    """Without an entry for it: the same numbers, and the miss is counted."""
    layers = blocks(1)
    ours = copy.deepcopy(layers)
    add_tvm_dispatch(ours[0], example().requires_grad_())

    def call(each: nn.Sequential, x: Tensor) -> Tensor:
        return checkpoint(each[0], x, use_reentrant=reentrant)

    assert_equal(step(ours, call, seed=3), step(layers, call, seed=3))
    assert stats(ours[0]).hits == (1 if reentrant else 2)
    assert sum(stats(ours[0]).misses.values()) == (1 if reentrant else 0)


@pytest.mark.composes("`torch.utils.checkpoint`")
@pytest.mark.parametrize("partition", ["min_cut", "save_all", "recompute_all"])
def test_inside_a_loop_of_layers(partition):
    layers = blocks(3)
    ours = dispatched(layers, example(), partition)

    def call(each: nn.Sequential, x: Tensor) -> Tensor:
        for layer in each:
            x = checkpoint(layer, x, use_reentrant=False)
        return x

    for seed in (4, 5):
        assert_equal(step(ours, call, seed), step(layers, lambda each, x: each(x), seed))
    assert [stats(layer).hits for layer in ours] == [4, 4, 4]

    x = example().requires_grad_()
    kept = saved_for_backward(ours, lambda: call(ours, x), x, outputs_free=True)
    assert kept == 2 * x.nbytes, "between the layers, and nothing inside of them"


@KINDS
def test_inside_a_loop_the_first_run_without_gradients(reentrant):
    layers = blocks(3)
    ours = dispatched(layers, example())
    for layer in ours:
        with torch.no_grad():
            add_tvm_dispatch(layer, example().requires_grad_(), on_miss="error")

    def call(each: nn.Sequential, x: Tensor) -> Tensor:
        for layer in each:
            x = checkpoint(layer, x, use_reentrant=reentrant)
        return x

    assert_equal(step(ours, call, seed=6), step(layers, lambda each, x: each(x), seed=6))
    assert [stats(layer).hits for layer in ours] == [2, 2, 2]


@KINDS
def test_segments_of_a_loop(reentrant):
    layers = blocks(4)
    ours = dispatched(layers, example())
    for layer in ours:
        with torch.no_grad():
            for requires in (False, True):  # the first layer of a segment gets a tensor that requires grad
                add_tvm_dispatch(layer, example().requires_grad_(requires), on_miss="error")

    def call(each: nn.Sequential, x: Tensor) -> Tensor:
        return checkpoint_sequential(each, 2, x, use_reentrant=reentrant)

    assert_equal(step(ours, call, seed=7), step(layers, lambda each, x: each(x), seed=7))


def test_one_layer_of_several_is_checkpointed():
    layers = blocks(3)
    ours = dispatched(layers, example())

    def call(each: nn.Sequential, x: Tensor) -> Tensor:
        return each[2](checkpoint(each[1], each[0](x), use_reentrant=False))

    assert_equal(step(ours, call, seed=8), step(layers, lambda each, x: each(x), seed=8))
    assert [stats(layer).hits for layer in ours] == [1, 2, 1]


class Loop(nn.Module):
    """A model that checkpoints its own layers."""

    def __init__(self, layers: nn.Sequential, reentrant: bool):
        super().__init__()
        self.layers, self.reentrant = layers, reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


def test_a_model_that_checkpoints_its_own_layers():
    """Captured as if it did not: the partition decides which values are recomputed."""
    model = Loop(blocks(2), reentrant=False)
    ours = add_tvm_dispatch(copy.deepcopy(model), example().requires_grad_(), on_miss="error")
    call = lambda each, x: each(x)  # noqa: E731
    assert_equal(step(ours, call, seed=9), step(model, call, seed=9))
    assert stats(ours).hits == 1 and stats(ours).entries[0].plan.recomputed


@pytest.mark.composes("`torch.utils.checkpoint`")
def test_a_reentrant_checkpoint_inside_is_refused_by_name():
    model = Loop(blocks(2), reentrant=True)
    with pytest.raises(UnsupportedModule, match=r"CheckpointFunction: a custom autograd\.Function"):
        add_tvm_dispatch(model, example().requires_grad_())


def inner_in_outer(each: nn.Sequential, x: Tensor) -> Tensor:
    def inner(y: Tensor) -> Tensor:
        return each[0](torch.cos(each[0](y)))

    return checkpoint(lambda y: each[0](checkpoint(inner, y, use_reentrant=False)), x, use_reentrant=False)


@pytest.mark.composes(
    "nested checkpoints, early stop; selective ones",
    "works; eager, with a reason",
    section="Autograd, memory, threads",
)
@pytest.mark.parametrize("early_stop", [True, False])
def test_nested(early_stop):
    """A checkpoint in a checkpoint, stopped early or not when it is computed again; masks are the same each time."""
    layers = blocks(1)
    ours = dispatched(layers, example())
    with set_checkpoint_early_stop(early_stop):
        assert_equal(step(ours, inner_in_outer, seed=3), step(layers, inner_in_outer, seed=3))
    assert stats(ours[0]).hits >= 3


@pytest.mark.composes("nested checkpoints, early stop; selective ones")
def test_selective():
    """A selective checkpoint chooses saved tensors by operator: the module inside runs eager, and says why."""
    layers = blocks(1)
    ours = copy.deepcopy(layers)
    add_tvm_dispatch(ours[0], example().requires_grad_())

    def call(each: nn.Sequential, x: Tensor) -> Tensor:
        def choose():
            return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])

        return checkpoint(lambda y: torch.sin(each[0](y)), x, use_reentrant=False, context_fn=choose)

    assert_equal(step(ours, call, seed=3), step(layers, call, seed=3))
    assert stats(ours[0]).hits == 0
    assert list(stats(ours[0]).misses) == ["torch dispatch mode: compiled for False, called with True"]


def test_saved_tensors_hooks_that_raise_or_round():
    """A hook's error reaches the caller; a hook's change of a saved tensor changes the gradient."""

    class Refused(Exception):
        pass

    def refuse(_: Tensor) -> Tensor:
        raise Refused

    layers = blocks(1).eval()
    ours = dispatched(layers, example())
    for pack, unpack in ((refuse, torch.clone), (torch.clone, refuse)):
        with pytest.raises(Refused), saved_tensors_hooks(pack, unpack):
            ours(example().requires_grad_()).sum().backward()
    with saved_tensors_hooks(Tensor.float, Tensor.double):
        rounded = torch.autograd.grad(ours(x := example().requires_grad_()).square().sum(), [x, *ours.parameters()])
    wanted = torch.autograd.grad(layers(x := example().requires_grad_()).square().sum(), [x, *layers.parameters()])
    torch.testing.assert_close(rounded, wanted, rtol=1e-4, atol=1e-4)
    assert not torch.equal(rounded[0], wanted[0])
    assert torch.autograd.gradcheck(ours, (example().requires_grad_(),))


@KINDS
def test_an_entry_that_is_added_inside_a_checkpoint(reentrant):
    """The checkpoint counts its saved tensors; capturing inside it saves none of them."""
    layers, x = blocks(1), example()
    mine = copy.deepcopy(layers)
    add_tvm_dispatch(mine[0], x[:2].clone().requires_grad_(), on_miss="compile")

    def call(each: nn.Sequential, x: Tensor) -> Tensor:
        return checkpoint(each, x, use_reentrant=reentrant)

    for seed in (5, 6):
        assert_equal(step(mine, call, seed), step(layers, call, seed))
    assert stats(mine[0]).hits >= 3


class SecondRun(nn.Module):
    """A checkpointed function that is not the same when the backward runs it again."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind, self.calls = kind, 0
        self.layer, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.register_buffer("scale", torch.ones(8))

    def body(self, x: Tensor) -> Tensor:
        if self.kind == "counts":
            self.calls += 1
        y = self.layer(x) * self.scale
        return (self.norm(y) if self.kind == "running statistics" else F.dropout(y, 0.3)).sin()

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.body, x, use_reentrant=False, preserve_rng_state=self.kind != "draws anew")
        if self.kind == "written later":
            with torch.no_grad():
                self.scale.mul_(0.9).add_(y.mean(0), alpha=0.1)
        return y


@pytest.mark.composes("`torch.utils.checkpoint`")
@pytest.mark.parametrize(
    ("kind", "words"),
    {
        "running statistics": "buffer 'norm.running_mean': is written by forward, and a checkpoint reads it",
        "written later": "buffer 'scale': is written by forward, and a checkpoint reads it",
        "draws anew": "draws in a checkpoint with preserve_rng_state=False",
        "counts": "self.calls: Python state that forward changes",
    }.items(),
)
def test_what_the_second_run_would_compute_otherwise_is_refused_by_name(kind, words):
    model = SecondRun(kind).double()
    with pytest.raises(UnsupportedModule, match=words):
        add_tvm_dispatch(model, example().requires_grad_())


def test_a_checkpoint_that_the_backward_does_not_run_again_may_write():
    """Nothing in it requires grad, as in a backbone that is not trained."""
    torch.manual_seed(0)
    backbone = SecondRun("running statistics").double().requires_grad_(False)
    model = nn.Sequential(backbone, nn.Linear(8, 8).double())
    ours = add_tvm_dispatch(copy.deepcopy(model), example(), on_miss="error")
    torch.testing.assert_close(ours(example()), model(example()), rtol=1e-10, atol=1e-12)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-10, atol=1e-12)
