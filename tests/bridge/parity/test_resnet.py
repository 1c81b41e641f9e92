"""A ResNet in train mode: loss curve, running statistics and ``num_batches_tracked`` are eager's; then ``eval``."""

from __future__ import annotations

import copy

import torch
from sklearn.datasets import load_digits
from transformers import ResNetConfig, ResNetForImageClassification

from bridge import add_tvm_dispatch, stats

STEPS = 20
BATCH = 16


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Handwritten digits, 8 x 8 pixels in [0, 1] on three equal channels, enlarged to 16 x 16; and their classes."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float64)[:, None].expand(-1, 3, 8, 8) / 16
    return torch.nn.functional.interpolate(images, scale_factor=2), torch.tensor(data.target)


def resnet() -> torch.nn.Module:
    torch.manual_seed(0)
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=10)
    return ResNetForImageClassification(config).double().train()


def test_twenty_steps_then_eval():
    images, classes = digits()
    eager = resnet()
    dispatched = copy.deepcopy(eager)
    add_tvm_dispatch(dispatched, {"pixel_values": images[:BATCH], "labels": classes[:BATCH]})
    curves = []
    for module in (eager, dispatched):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
        curve = []
        for step in range(STEPS):
            rows = slice(step * BATCH, (step + 1) * BATCH)
            loss = module(pixel_values=images[rows], labels=classes[rows]).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            curve.append(loss.detach())
        curves.append(torch.stack(curve))
    assert stats(dispatched).hits == STEPS, stats(dispatched)
    torch.testing.assert_close(curves[1], curves[0], rtol=1e-8, atol=0)
    assert curves[0][-5:].mean() < curves[0][:5].mean(), "the model did not learn: the comparison says nothing"
    for (name, actual), expected in zip(dispatched.named_buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(
            actual, expected, rtol=1e-8, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )
        if name.endswith("num_batches_tracked"):
            assert actual == STEPS

    eager.eval(), dispatched.eval()
    with torch.no_grad():
        expected = eager(pixel_values=images[:BATCH]).logits
        torch.testing.assert_close(dispatched(pixel_values=images[:BATCH]).logits, expected, rtol=1e-8, atol=1e-10)
        assert stats(dispatched).hits == STEPS, "eval mode is another call: it runs eager until it has an entry"
        add_tvm_dispatch(dispatched, {"pixel_values": images[:BATCH]})
        torch.testing.assert_close(dispatched(pixel_values=images[:BATCH]).logits, expected, rtol=1e-8, atol=1e-10)
    assert stats(dispatched).hits == STEPS + 1
