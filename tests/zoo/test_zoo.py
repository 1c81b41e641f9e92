"""Common training scripts beside eager: dispatched, the same losses to rounding, the same parameters and draws."""

import pytest
import torch

from tests.zoo.run import compare, load, names

STEPS = 15
SLOW = ("char_model", "diffusion_unet", "lstm", "mae", "mamba", "neural_ode", "vit")
"""Over three seconds, mostly for the dispatch."""

ALWAYS = {"accumulation", "lora_hook", "maml", "moe_token_choice", "ppo", "vqvae", "word2vec"}
"""Scripts with their own way of training: accumulation with an averaged copy, hooks, double backward, data-dependent
branches, several epochs of one batch, a straight-through gradient, negative samples. Other tests train models with the
layers of the other scripts (U-Nets, transformers, two towers, bags, loops over time, experts, adversaries)."""


def _parameters():
    for name in names():
        marks = [pytest.mark.slow] * (name in SLOW) + [pytest.mark.sweep] * (name not in ALWAYS)
        yield pytest.param(name, marks=marks)


@pytest.mark.parametrize("name", list(_parameters()))
def test_script(name):
    script = load(name)
    found = compare(script.train, STEPS)
    assert found.generator, "the generator's state is not eager's"
    if found.loss > 1e-4 or found.state > 1e-3:  # rounding shrinks in float64, a bug does not
        assert_equal_in_float64(script)
    refused = getattr(script, "REFUSED", {})
    assert found.refusals.keys() == refused.keys(), found.refusals
    assert {module: word for module, word in refused.items() if word not in found.refusals[module]} == {}, found
    assert not found.misses, found.misses
    assert all(found.hits.values()), found.hits


def assert_equal_in_float64(script):
    """Equality to float64's precision: a larger difference in float32 is rounding (a kink, Adam where a gradient is
    zero in exact arithmetic). ``python -m tests.zoo --float64`` checks all scripts."""
    found = compare(script.train, STEPS, torch.float64)
    assert found.generator and found.loss <= 1e-8 and found.state <= 1e-6, found
