"""Shared parts of the examples: a small BERT, its data, and the dispatch of its encoder layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import BertConfig, BertForSequenceClassification

from benchmarks.text import build_tokenizer, corpus
from bridge import add_tvm_dispatch

VOCABULARY = 500


def make_model(*, layers: int, hidden: int, seed: int = 0, **options: Any) -> BertForSequenceClassification:
    """A BERT with random initial weights and dropout 0.1 that classifies two kinds of sequences."""
    config = BertConfig(
        vocab_size=VOCABULARY,
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=4,
        intermediate_size=4 * hidden,
        max_position_embeddings=128,
        **options,
    )
    torch.manual_seed(seed)
    return BertForSequenceClassification(config)


def make_examples(count: int, length: int, *, seed: int = 0) -> list[dict[str, Tensor]]:
    """Sequences of ``length`` tokens from the manual that ships with CPython; the label is the manual's half.

    The last tokens of every third sequence are padding.
    """
    documents = corpus()
    tokenizer = build_tokenizer(documents, VOCABULARY)
    middle = len(documents) // 2
    halves = [tokenizer.encode(" ".join(part)) for part in (documents[:middle], documents[middle:])]
    draw = torch.Generator().manual_seed(seed)
    examples = []
    for index in range(count):
        label = int(torch.randint(2, (), generator=draw))
        start = int(torch.randint(len(halves[label]) - length, (), generator=draw))
        mask = torch.ones(length, dtype=torch.int64)
        mask[length - 2 :] = int(index % 3 > 0)
        tokens = torch.tensor(halves[label][start : start + length]) * mask
        examples.append({"input_ids": tokens, "attention_mask": mask, "labels": torch.tensor(label)})
    return examples


def dispatch_layers(model: BertForSequenceClassification, batch: dict[str, Any]) -> list[nn.Module]:
    """Dispatches the encoder layers for their calls in ``model(**batch)``.

    A training calls its layers in several ways: without an attention mask where no token is padding, in evaluation,
    with another batch size at the end of an epoch. ``on_miss="compile"`` compiles each of these when it first occurs.

    Args:
        model: in train mode.
        batch: keyword arguments of the model in the training.

    Returns:
        The layers.
    """
    layers = list(model.bert.encoder.layer)
    for layer, (args, kwargs) in zip(layers, _calls(model, layers, batch), strict=True):
        add_tvm_dispatch(layer, args, sample_kwargs=kwargs, on_miss="compile")
    return layers


def _calls(model: nn.Module, layers: list[nn.Module], batch: dict[str, Any]) -> list[tuple[tuple, dict[str, Any]]]:
    """The positional and keyword arguments of each layer in one call of the model, detached from its graph."""
    seen: list[tuple[tuple, dict[str, Any]]] = []

    def record(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        seen.append((args, kwargs))

    def off_the_graph(leaf: Any) -> Any:
        return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf

    handles = [layer.register_forward_pre_hook(record, with_kwargs=True) for layer in layers]
    with torch.random.fork_rng(devices=[]):
        model(**batch)
    for handle in handles:
        handle.remove()
    return pytree.tree_map(off_the_graph, seen)
