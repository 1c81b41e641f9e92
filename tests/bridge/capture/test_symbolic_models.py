"""Models captured once with sizes that vary: every stage gives eager's results and gradients at every size."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional as F

from tests.bridge.symbolic import assert_as_eager, differentiated, imported
from tests.sampling import sampled

pytestmark = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="products and poolings of older versions fix the sizes, or guard them further"
)

BATCH, LENGTH = Dim("batch"), Dim("length")


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def guards(lowered) -> list[str]:
    return [str(guard) for guard in lowered.captured.sizes.scope.guards]


def test_mlp():
    module = nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 3)).double()
    lowered = differentiated(module, normal(5, 6), ({0: BATCH},))
    assert_as_eager(lowered, lambda n: normal(n, 6), [(2,), (5,), (13,)])
    assert guards(lowered) == []


def test_dropout_where_no_number_is_read():
    module = nn.Sequential(nn.Linear(6, 9), nn.Dropout(0.2), nn.Linear(9, 3)).double()
    lowered = differentiated(module, normal(5, 6), ({0: BATCH},))
    assert_as_eager(lowered, lambda n: normal(n, 6), [(2,), (5,), (13,)])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x, mask):
        batch, length, width = x.shape
        q, k, v = self.inner(x).view(batch, length, 3, 2, 4).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2)) / 2
        scores = scores.masked_fill(mask[:, None, None, :] == 0, -1e9)
        weights = F.dropout(scores.softmax(-1), 0.1)
        y = (weights @ v).transpose(1, 2).reshape(batch, length, width)
        return F.dropout(self.out(y), 0.2) + x


def masked(batch: int, length: int) -> dict[str, torch.Tensor]:
    return {"x": normal(batch, length, 8), "mask": (torch.arange(batch * length).reshape(batch, length) % 5 > 0).long()}


def test_attention_with_mask_and_dropout():
    shapes = {"x": {0: BATCH, 1: LENGTH}, "mask": {0: BATCH, 1: LENGTH}}
    lowered = differentiated(Attention().double(), masked(4, 6), shapes)
    assert_as_eager(lowered, masked, [(4, 6), (2, 2), (3, 11), (7, 5)])
    assert guards(lowered) == []
    assert sorted(symbol.name for symbol in lowered.captured.sizes.scope.samples) == ["batch", "length"]


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places, self.norm = nn.Embedding(17, 8), nn.Embedding(40, 8), nn.LayerNorm(8)
        self.head = nn.Linear(8, 17)

    def forward(self, ids, labels):
        x = self.norm(self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device)))
        logits = self.head(x)
        return F.cross_entropy(logits.view(-1, 17), labels.view(-1)), logits


def tokens(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.arange(batch * length).reshape(batch, length) * 7 % 17
    return ids, torch.where(ids % 4 == 0, -100, ids)


def test_embeddings_and_a_loss():
    lowered = differentiated(Classifier().double(), tokens(4, 6), ({0: BATCH, 1: LENGTH}, {0: BATCH, 1: LENGTH}))
    assert_as_eager(lowered, tokens, [(4, 6), (2, 2), (3, 11), (7, 40)])


@pytest.mark.parametrize("padding", sampled([0, 1], [1]))
def test_convolution_and_batch_norm(padding):
    module = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=padding), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 5, 2, stride=2)
    ).double()
    height, width = Dim("height", min=10), Dim("width", min=10)
    lowered = differentiated(module, normal(3, 3, 10, 12), ({0: BATCH, 2: height, 3: width},))
    assert_as_eager(lowered, lambda *s: normal(s[0], 3, *s[1:]), [(3, 10, 12), (2, 10, 10), (5, 13, 11), (2, 11, 16)])


@pytest.mark.sweep
def test_a_bert_layer():
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertLayer

    config = BertConfig(hidden_size=8, num_attention_heads=2, intermediate_size=12, attn_implementation="eager")
    lowered = imported(BertLayer(config).double(), normal(4, 6, 8), ({0: BATCH, 1: LENGTH},))
    assert_as_eager(lowered, lambda *s: normal(*s, 8), [(4, 6), (2, 2), (3, 11)])
    assert guards(lowered) == []


TEXTS = {name: {0: BATCH, 1: LENGTH} for name in ("input_ids", "attention_mask", "labels")}


def texts(batch: int, length: int) -> dict[str, torch.Tensor]:
    ids, labels = tokens(batch, length)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


@pytest.mark.sweep
def test_a_gpt2_model():
    """Attention by hand."""
    from transformers import GPT2Config, GPT2LMHeadModel

    widths = {"n_embd": 8, "n_head": 2, "n_layer": 1, "n_positions": 40, "vocab_size": 17, "bos_token_id": 1}
    config = GPT2Config(**widths, eos_token_id=2, attn_implementation="eager", use_cache=False)
    lowered = imported(GPT2LMHeadModel(config).double(), texts(4, 6), TEXTS)
    assert_as_eager(lowered, texts, [(4, 6), (2, 2), (3, 11)])
    assert guards(lowered) == []


@pytest.mark.sweep
def test_a_llama_model():
    """Torch's attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=1,
        intermediate_size=12,
        max_position_embeddings=40,
        vocab_size=17,
        attn_implementation="sdpa",
        use_cache=False,
    )
    lowered = imported(LlamaForCausalLM(config).double(), texts(4, 6), TEXTS)
    assert_as_eager(lowered, texts, [(4, 6), (2, 2), (3, 11)])
    assert guards(lowered) == []
