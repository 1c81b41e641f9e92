"""HuggingFace's ``gradient_checkpointing_enable``: the whole model dispatched, or its layers, beside eager."""

import copy

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from bridge import UnsupportedModule, add_tvm_dispatch, stats
from tests.bridge.models import VOCABULARY, masked_lm
from tests.sampling import sampled

STEPS = 8
#: GPT-2 computes its loss in float32, whatever the type of the model.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-6}


def gpt2():
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=24, n_layer=1, n_head=3, n_positions=40, bos_token_id=0, eos_token_id=0
    )
    config.use_cache, config._attn_implementation = False, "eager"
    return GPT2LMHeadModel(config).train()


MODELS = {
    "BERT": (lambda: masked_lm(layers=1), lambda model: model.bert.encoder.layer),
    "GPT-2": (gpt2, lambda m: m.transformer.h),
}


def made(name, *, reentrant):
    """The model in float64, checkpointed, with the hook that makes the embeddings require gradients; its layers."""
    make, layers_of = MODELS[name]
    torch.manual_seed(0)
    model = make().double()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    return model, layers_of(model)


def batch(generator):
    ids = torch.randint(0, VOCABULARY, (2, 9), generator=generator)
    return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


def trained(model):
    torch.manual_seed(3)
    optimizer, generator, losses = torch.optim.SGD(model.parameters(), lr=0.1), torch.Generator().manual_seed(5), []
    for _ in range(STEPS):
        loss = model(**batch(generator)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return torch.tensor(losses, dtype=torch.float64), loss.dtype, torch.get_rng_state()


def check(model, eager):
    (losses, kind, state), (wanted, _, wanted_state) = trained(model), trained(eager)
    torch.testing.assert_close(losses, wanted, rtol=TOLERANCE[kind], atol=0)
    assert torch.equal(state, wanted_state)


@pytest.mark.composes(
    "HuggingFace `gradient_checkpointing_enable`",
    "works, the partition chooses the saved tensors; `use_reentrant=True`: refused with a hint",
    section="HuggingFace",
)
@pytest.mark.parametrize("name", sampled(MODELS, ["BERT"]))
def test_the_whole_model(name):
    model, _ = made(name, reentrant=False)
    eager = copy.deepcopy(model)
    add_tvm_dispatch(model, batch(None))
    check(model, eager)
    assert stats(model).hits == STEPS


@pytest.mark.composes("HuggingFace `gradient_checkpointing_enable`")
@pytest.mark.parametrize("name", sampled(MODELS, ["BERT"]))
def test_its_layers(name):
    model, layers = made(name, reentrant=False)
    eager = copy.deepcopy(model)
    for layer in layers:
        add_tvm_dispatch(layer, on_miss="compile")
    check(model, eager)
    assert [stats(layer).hits for layer in layers] == [STEPS] * len(layers)


@pytest.mark.composes("HuggingFace `gradient_checkpointing_enable`")
@pytest.mark.parametrize("name", sampled(MODELS, ["BERT"]))
def test_the_reentrant_kind_is_refused_with_a_hint(name):
    model, _ = made(name, reentrant=True)
    with pytest.raises(UnsupportedModule, match=r"CheckpointFunction[\s\S]*use_reentrant=False"):
        add_tvm_dispatch(model, batch(None))
