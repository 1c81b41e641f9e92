"""Tiny models whose calls have many sizes: constructor, inputs for given sizes, ``dynamic_shapes``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F

VOCABULARY = 53
LONGEST = 40
WIDTH = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 40}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BATCH = Dim.DYNAMIC
LENGTH = Dim("length", max=LONGEST)

TEXTS = ((3, 17), (2, 2), (2, LONGEST), (5, 7), (7, 13), (4, 8), (11, 3), (13, 29), (16, 16), (2, 31))
"""``(batch, length)``: the sample, then the ends of the range, primes and powers of two."""


@dataclass(frozen=True)
class Varying:
    """A model whose calls have many sizes.

    Attributes:
        make: the model.
        inputs: from sizes to its keyword arguments; the model returns something with a ``loss``, or the loss.
        shapes: ``dynamic_shapes=`` of the inputs.
        sizes: ten of them; the first are the sample's.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[..., dict[str, Tensor]]
    shapes: dict[str, Any]
    sizes: tuple[tuple[int, ...], ...]


def texts(batch: int, length: int) -> dict[str, Tensor]:
    """Token sequences that are padded at the end, labels where a token stands."""
    ids, mask = torch.randint(4, VOCABULARY, (batch, length)), padded(batch, length)
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}


def padded(batch: int, length: int) -> Tensor:
    """Whether a token stands there; the first sequence is the longest, and another one is shorter."""
    lengths = torch.tensor([max(1, length - 2 * row) for row in range(batch)])
    return torch.arange(length) < lengths[:, None]


ROW = {0: BATCH}
TEXT = {0: BATCH, 1: LENGTH}


def bert() -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": LONGEST}
    return hf.BertForMaskedLM(hf.BertConfig(**{**WIDTH, "num_hidden_layers": 2}, **sizes))


def gpt2() -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "n_embd": 24, "n_layer": 1, "n_head": 4, "n_positions": LONGEST}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, **SPECIAL, use_cache=False))


def llama() -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": LONGEST, "num_key_value_heads": 2}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**WIDTH, **sizes, **SPECIAL, attention_dropout=0.1, use_cache=False))


def t5() -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "d_model": 24, "d_kv": 8, "d_ff": 40, "num_heads": 3}
    layers = {"num_layers": 1, "num_decoder_layers": 2}  # of two, the second has its positions from the first
    config = hf.T5Config(**sizes, **layers, dropout_rate=0.1, decoder_start_token_id=0, use_cache=False)
    return hf.T5ForConditionalGeneration(config)


def translations(batch: int, source: int, target: int) -> dict[str, Tensor]:
    found = texts(batch, source)
    return {**found, "labels": torch.randint(4, VOCABULARY, (batch, target))}


def vit() -> nn.Module:
    dropout = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    return hf.ViTForImageClassification(hf.ViTConfig(**WIDTH, **dropout, image_size=16, patch_size=8, num_labels=3))


def images(batch: int, height: int = 16, width: int = 16) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(batch, 3, height, width).double(), "labels": torch.randint(3, (batch,))}


def resnet() -> nn.Module:
    config = hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 12], depths=[1, 1], layer_type="basic", num_labels=3)
    return hf.ResNetForImageClassification(config)


class Translator(nn.Module):
    """``nn.Transformer`` with padding masks and causal masks."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 16)
        self.positions = nn.Embedding(LONGEST, 16)
        self.transformer = nn.Transformer(16, 4, 1, 1, 32, 0.1, batch_first=True)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor, padding: Tensor) -> Tensor:
        states = self.transformer(
            self.embed(source),
            self.embed(target),
            tgt_mask=torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1),
            tgt_is_causal=True,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        return F.cross_entropy(self.head(states).flatten(0, 1), target.flatten())

    def embed(self, words: Tensor) -> Tensor:
        return self.words(words) + self.positions(torch.arange(words.shape[1]))


def translator_inputs(batch: int, source: int, target: int) -> dict[str, Tensor]:
    words = [torch.randint(VOCABULARY, (batch, length)) for length in (source, target)]
    return {"source": words[0], "target": words[1], "padding": ~padded(batch, source)}


class Segmenter(nn.Module):
    """A U-Net of one level: pooled, resized to any picture's size, joined; a class for each pixel."""

    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.GELU())
        self.middle = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.InstanceNorm2d(6, affine=True), nn.Dropout2d(0.1))
        self.up = nn.ConvTranspose2d(6, 6, 2, stride=2)
        self.head = nn.Conv2d(18, 4, 1)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        fine = self.down(pixel_values)
        coarse = self.middle(F.max_pool2d(fine, 2))
        ways = (F.interpolate(each, fine.shape[2:], mode="bilinear") for each in (coarse, self.up(coarse)))
        return F.cross_entropy(self.head(torch.cat([fine, *ways], 1)), labels)


def scenes(batch: int, height: int, width: int) -> dict[str, Tensor]:
    return {**images(batch, height, width), "labels": torch.randint(4, (batch, height, width))}


class Recommender(nn.Module):
    """Embeddings of categories and a layer of numbers, multiplied with each other; bags of categories are summed."""

    def __init__(self):
        super().__init__()
        self.categories = nn.ModuleList(nn.Embedding(20, 8) for _ in range(3))
        self.bag = nn.EmbeddingBag(20, 8, mode="sum")
        self.bottom = nn.Sequential(nn.Linear(5, 8), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(18, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))

    def forward(self, numbers: Tensor, categories: Tensor, bags: Tensor, clicked: Tensor) -> Tensor:
        dense = self.bottom(numbers)
        parts = [each(categories[:, index]) for index, each in enumerate(self.categories)]
        parts = torch.stack([dense, *parts, self.bag(bags)], 1)
        rows, columns = torch.triu_indices(5, 5, 1)
        products = (parts @ parts.transpose(1, 2))[:, rows, columns]
        return F.binary_cross_entropy_with_logits(self.top(torch.cat([dense, products], 1)).squeeze(1), clicked)


def visits(batch: int) -> dict[str, Tensor]:
    return {
        "numbers": torch.randn(batch, 5).double(),
        "categories": torch.randint(20, (batch, 3)),
        "bags": torch.randint(20, (batch, 4)),
        "clicked": torch.randint(2, (batch,)).double(),
    }


PICTURES = (
    (3, 24, 28),
    (2, 16, 16),
    (2, 23, 19),
    (5, 32, 17),
    (4, 37, 31),
    (7, 18, 40),
    (3, 64, 64),
    (11, 20, 20),
    (2, 29, 53),
    (8, 33, 32),
)
SCENES = (
    (3, 6, 7),
    (2, 4, 4),
    (2, 9, 5),
    (5, 8, 17),
    (4, 7, 11),
    (7, 8, 10),
    (3, 16, 16),
    (11, 5, 5),
    (2, 9, 13),
    (8, 6, 8),
)
ROWS = ((6,), (2,), (3,), (5,), (16,), (17,), (31,), (64,), (97,), (128,))
TWO_LENGTHS = (
    (3, 7, 5),
    (2, 2, 3),
    (2, LONGEST, 3),
    (3, 2, LONGEST),
    (5, 5, 5),
    (7, 11, 13),
    (4, 8, 16),
    (2, 3, 4),
    (11, 5, 7),
    (6, 31, 29),
)
TARGET = {0: BATCH, 1: Dim("target", min=3, max=LONGEST)}
"""Not from 2 on: T5 moves the labels by one, and torch.export asks whether one token is left."""

MODELS = {
    "bert": Varying(bert, texts, dict.fromkeys(texts(2, 2), TEXT), TEXTS),
    "gpt2": Varying(gpt2, texts, dict.fromkeys(texts(2, 2), TEXT), TEXTS),
    "llama": Varying(llama, texts, dict.fromkeys(texts(2, 2), TEXT), TEXTS),
    "t5": Varying(t5, translations, dict.fromkeys(texts(2, 2), TEXT) | {"labels": TARGET}, TWO_LENGTHS),
    "vit": Varying(vit, images, dict.fromkeys(images(2), ROW), ROWS),
    "resnet": Varying(
        resnet, images, {"pixel_values": {0: BATCH, 2: Dim.DYNAMIC, 3: Dim.DYNAMIC}, "labels": {0: BATCH}}, PICTURES
    ),
    "transformer": Varying(
        Translator,
        translator_inputs,
        dict.fromkeys(("source", "padding"), TEXT) | {"target": {0: BATCH, 1: Dim("target", max=LONGEST)}},
        (*TWO_LENGTHS[:-1], (3, 2, 2)),
    ),
    "segmenter": Varying(
        Segmenter,
        scenes,
        {"pixel_values": {0: BATCH, 2: Dim.DYNAMIC, 3: Dim.DYNAMIC}, "labels": {0: BATCH, 1: Dim.AUTO, 2: Dim.AUTO}},
        SCENES,
    ),
    "recommender": Varying(Recommender, visits, dict.fromkeys(visits(2), ROW), ROWS),
}
"""By name; dropout is 0.1."""
