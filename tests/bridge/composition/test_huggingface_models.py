"""HuggingFace's models as they come from ``Model(config)``: outputs, their types and caches, three steps; eager's."""

import copy

import pytest
import torch
import transformers as hf

from bridge import add_tvm_dispatch, stats
from tests.bridge.dispatch.test_result_objects import described
from tests.sampling import sampled

pytestmark = pytest.mark.slow

WIDTH = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "vocab_size": 50}
TOKENS = torch.randint(3, 50, (2, 7), generator=torch.Generator().manual_seed(0))
TEXT = {"input_ids": TOKENS, "labels": TOKENS}
WHISPER = {
    **{f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in {"layers": 1, "ffn_dim": 32}.items()},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_mel_bins": 8, "d_model": 16},
    **{"max_source_positions": 10, "max_target_positions": 12, "decoder_start_token_id": 1},
    **{"suppress_tokens": None, "begin_suppress_tokens": None},
}

MODELS = {
    "BERT": ("BertModel", "BertConfig", {"vocab_size": 50, **WIDTH}, {"input_ids": TOKENS}),
    "GPT-2": ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 16, "n_layer": 1, "n_head": 2, **SPECIAL}, TEXT),
    "LLaMA": ("LlamaForCausalLM", "LlamaConfig", {"num_key_value_heads": 1, **WIDTH, **SPECIAL}, TEXT),
    "T5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
        | {"decoder_start_token_id": 0},
        {"input_ids": TOKENS, "labels": TOKENS[:, :5].clone()},
    ),
    "OPT": (
        "OPTForCausalLM",
        "OPTConfig",
        {"hidden_size": 16, "num_hidden_layers": 1, "ffn_dim": 32, "num_attention_heads": 2, "word_embed_proj_dim": 16}
        | {"max_position_embeddings": 32, **SPECIAL},
        TEXT,
    ),
    "Mistral": ("MistralForCausalLM", "MistralConfig", {"num_key_value_heads": 1, **WIDTH, **SPECIAL}, TEXT),
    "ViT": (
        "ViTForImageClassification",
        "ViTConfig",
        {"image_size": 8, "patch_size": 4, "num_labels": 3, "hidden_dropout_prob": 0.1, **WIDTH},
        {"pixel_values": torch.linspace(-1, 1, 384).view(2, 3, 8, 8), "labels": torch.tensor([0, 2])},
    ),
    "Whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {**WHISPER, **SPECIAL},
        {"input_features": torch.linspace(-1, 1, 320).view(2, 8, 20), "labels": TOKENS[:, :5].clone()},
    ),
}

ALWAYS = ("LLaMA", "T5")
"""A cache, rotations with keys that heads share, an encoder beside a decoder; other tests have BERT and ViT, and
GPT-2 with its cache."""


@pytest.mark.composes(
    "BERT, GPT-2, LLaMA, T5, OPT, Mistral, ViT, Whisper as they come from their config",
    "work; the cache of keys and values is eager's",
    section="HuggingFace",
)
@pytest.mark.parametrize("name", sampled(MODELS, ALWAYS))
def test_a_model_as_it_comes(name):
    model, config, options, batch = MODELS[name]
    torch.manual_seed(0)
    mine = getattr(hf, model)(getattr(hf, config)(**options)).train()
    eager = copy.deepcopy(mine)
    add_tvm_dispatch(mine, batch)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (mine, eager)]
    for step in range(3):
        results = []
        for each, optimizer in zip((mine, eager), optimizers, strict=True):
            torch.manual_seed(step)
            results.append(each(**batch))
            (results[-1].loss if "loss" in results[-1] else results[-1][0].sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_same(*map(described, results))
    assert stats(mine).hits == 3 and not stats(mine).misses
    assert ("past_key_values" in results[0]) == ("BERT" not in model.upper() and model != "ViTForImageClassification")


def assert_same(mine, eager):
    """The same types and constants in the same places, tensors to rounding, with the same strides."""
    assert [entry[0] for entry in mine] == [entry[0] for entry in eager]
    for (place, *one), (_, *other) in zip(mine, eager, strict=True):
        if isinstance(other[0], torch.Tensor):
            torch.testing.assert_close(one[0], other[0], atol=1e-5, rtol=1e-4)
            assert (one[0].requires_grad, one[0].stride()) == (other[0].requires_grad, other[0].stride()), place
        else:
            assert one == other, place


def test_a_cache_that_is_used_for_generation_can_be_gone_on_with():
    """The compiled call returns an ordinary cache: eager appends to it."""
    torch.manual_seed(0)
    _, _, options, _ = MODELS["GPT-2"]
    model = hf.GPT2LMHeadModel(hf.GPT2Config(**options)).eval()
    with torch.no_grad():
        expected = model(TOKENS[:, :6], past_key_values=None).past_key_values
        add_tvm_dispatch(model, {"input_ids": TOKENS[:, :6]})
        cache = model(input_ids=TOKENS[:, :6]).past_key_values
        assert stats(model).hits == 1
        results = [model(TOKENS[:, 6:], past_key_values=each).logits for each in (cache, expected)]
    torch.testing.assert_close(*results)
    assert cache.get_seq_length() == expected.get_seq_length() == 7
