"""Fifty optimizer steps of a tiny BERT: the dispatched loss curve is eager's, whole model or layer by layer."""

import copy

import pytest
import torch

from bridge import add_tvm_dispatch, stats
from tests.bridge.models import masked_labels, masked_lm
from tests.sampling import sampled

pytestmark = pytest.mark.slow

STEPS = 50


def batches(count: int, shape: tuple[int, int] = (4, 13)) -> list[dict[str, torch.Tensor]]:
    """Sequences that count modulo 9 from a random start: which 9 of the 61 tokens occur is learned in a few steps."""
    generator = torch.Generator().manual_seed(7)
    result = []
    for _ in range(count):
        start = torch.randint(9, (shape[0], 1), generator=generator)
        ids = 2 + (start + torch.arange(shape[1])) % 9
        labels = masked_labels(ids)
        result.append({"input_ids": ids.masked_fill(labels != -100, 1), "labels": labels})
    return result


def train(model, data, *, lr: float = 2e-3) -> list[float]:
    """The losses of one AdamW step per batch under a fixed seed."""
    torch.manual_seed(11)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses = []
    for batch in data:
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def layer_samples(layers, model, batch):
    """The arguments with which a model calls each of its layers, detached."""
    seen = []

    def record(layer, args, kwargs):
        seen.append((args, kwargs))

    handles = [layer.register_forward_pre_hook(record, with_kwargs=True) for layer in layers]
    model(**batch)
    for handle in handles:
        handle.remove()

    def detach(leaf):
        return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf

    return torch.utils._pytree.tree_map(detach, seen)


@pytest.mark.parametrize("attention", sampled(["eager", "sdpa"], ["eager"]))
def test_whole_model_float64(attention):
    torch.manual_seed(0)
    eager = masked_lm(attention=attention).double()
    dispatched = copy.deepcopy(eager)
    data = batches(STEPS)
    add_tvm_dispatch(dispatched, data[0])
    actual, expected = train(dispatched, data), train(eager, data)
    assert expected[-1] < 0.9 * expected[0], "nothing was learned, the comparison is worth little"
    torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-8)
    assert stats(dispatched).hits == STEPS
    assert not stats(dispatched).misses


@pytest.mark.sweep
@pytest.mark.parametrize("partition", ["save_all", "min_cut"])
def test_whole_model_float32(partition):
    torch.manual_seed(0)
    eager = masked_lm()
    dispatched = copy.deepcopy(eager)
    data = batches(STEPS)
    add_tvm_dispatch(dispatched, data[0], partition=partition)
    actual, expected = train(dispatched, data, lr=5e-4), train(eager, data, lr=5e-4)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)
    assert stats(dispatched).hits == STEPS


def test_layer_by_layer_float64():
    torch.manual_seed(0)
    eager = masked_lm().double()
    dispatched = copy.deepcopy(eager)
    data = batches(STEPS)
    layers = dispatched.bert.encoder.layer
    for layer, (args, kwargs) in zip(layers, layer_samples(layers, dispatched, data[0]), strict=True):
        add_tvm_dispatch(layer, args, sample_kwargs=kwargs)
    torch.testing.assert_close(train(dispatched, data), train(eager, data), rtol=1e-8, atol=1e-8)
    assert [stats(layer).hits for layer in layers] == [STEPS] * len(layers)
    assert not any(stats(layer).misses for layer in layers)


def test_a_batch_of_another_shape_in_between():
    """The short last batch of an epoch runs eager, and the curve does not notice."""
    torch.manual_seed(0)
    eager = masked_lm().double()
    dispatched = copy.deepcopy(eager)
    data = batches(3) + batches(1, (2, 13)) + batches(3)
    add_tvm_dispatch(dispatched, data[0])
    torch.testing.assert_close(train(dispatched, data), train(eager, data), rtol=1e-9, atol=1e-9)
    assert stats(dispatched).hits == 6
    assert sum(stats(dispatched).misses.values()) == 1
