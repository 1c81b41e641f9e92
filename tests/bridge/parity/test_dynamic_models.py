"""Whole models, one entry for all sizes: gradients at ten of them, then thirty steps of training with twenty."""

from __future__ import annotations

import copy
import itertools
import random
import types
from collections.abc import Container, Iterable, Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama import modeling_llama
from transformers.models.t5 import modeling_t5

from bridge import add_tvm_dispatch, stats
from tests.bridge.compare import Call, assert_same, clone_tree, run
from tests.bridge.parity.dynamic_models import MODELS, Varying
from tests.device import DEVICE

pytestmark = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="products and poolings of older versions fix the sizes, or guard them further"
)

STEPS = 30
SIZES = 20
QUICK = ("recommender",)

ALWAYS = ("resnet", "recommender")
"""Convolutions, tables of rows. Smaller tests cover the other models: words with a mask
tests/bridge/dispatch/test_dynamic_attention.py and test_trainer_uses.py, rotations
tests/bridge/capture/test_symbolic_models.py."""


class Pair(NamedTuple):
    model: Varying
    eager: nn.Module
    dispatched: nn.Module


GRADIENTS_ONLY = ("segmenter",)


def of(names: Iterable[str], always: Container[str]) -> pytest.MarkDecorator:
    """A pair for each of these models; models that are not in ``always`` are marked as a sweep."""
    slow, sweep = pytest.mark.slow, pytest.mark.sweep
    each = [pytest.param(name, marks=[slow] * (name not in QUICK) + [sweep] * (name not in always)) for name in names]
    return pytest.mark.parametrize("pair", each, indirect=True, scope="module")


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A model wholly in float64: where its code asks for float32 (norms, rotations, losses), it gets float64."""
    model = MODELS[request.param]
    double = types.ModuleType("torch")
    double.__dict__.update(torch.__dict__, float32=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "float", Tensor.double)
        for module in (modeling_llama, modeling_t5):
            patch.setattr(module, "torch", double)
        torch.manual_seed(0)
        eager = model.make().double().train().to(DEVICE)
        dispatched = copy.deepcopy(eager)
        add_tvm_dispatch(dispatched, model.inputs(*model.sizes[0]), dynamic_shapes=model.shapes)
        yield Pair(model, eager, dispatched)


@of(MODELS, ALWAYS)
def test_gradients_at_ten_sizes(pair):
    model, eager, dispatched = pair
    for sizes in model.sizes:
        inputs = model.inputs(*sizes)
        call = [Call(kwargs=clone_tree(inputs)) for _ in range(2)]
        assert_same(run(dispatched, call[0]), run(eager, call[1]))
    assert len(set(model.sizes)) == 10
    assert (stats(dispatched).hits, len(stats(dispatched).entries)) == (10, 1), stats(dispatched)


def many(sizes: tuple[tuple[int, ...], ...]) -> list[tuple[int, ...]]:
    """The sample's sizes, then others between the least and the largest of each."""
    found, chosen = dict.fromkeys(sizes[:1]), random.Random(0)
    bounds = [(min(numbers), max(numbers)) for numbers in zip(*sizes, strict=True)]
    while len(found) < SIZES:
        found[tuple(chosen.randint(low, high) for low, high in bounds)] = None
    return list(found)


@of((name for name in MODELS if name not in GRADIENTS_ONLY), ("resnet", "recommender"))
def test_thirty_steps_with_twenty_sizes(pair):
    model, eager, dispatched = pair
    before = stats(dispatched).hits
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.02) for module in (eager, dispatched)]
    for step, sizes in zip(range(STEPS), itertools.cycle(many(model.sizes))):
        torch.manual_seed(step)
        inputs = model.inputs(*sizes)
        losses, states = [], []
        for module, optimizer in zip((eager, dispatched), optimizers, strict=True):
            torch.manual_seed(step)
            result = module(**inputs)
            loss = getattr(result, "loss", result)
            states.append(torch.get_rng_state())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-9, atol=0, msg=lambda m, s=step: f"step {s}: {m}")
        assert torch.equal(*states), f"step {step}: the generator's state is not eager's"
    for (name, actual), expected in zip(dispatched.state_dict().items(), eager.state_dict().values(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")
    counted = stats(dispatched)
    assert (counted.hits - before, len(counted.entries)) == (STEPS, 1) and not counted.misses, counted
