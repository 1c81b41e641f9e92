"""An epoch over texts of 3 to 200 tokens, each batch padded to its longest: eager, dynamic, static at the mean length.

The loop is a Trainer's: a collator pads ids, mask and labels of the batch, AdamW takes a step. Peers see the same
batches in turns; the static peer sees as many batches of the padded ones' mean length, and so about the same number of
padded tokens.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.export import Dim
from transformers import BertConfig, BertForMaskedLM

from benchmarks.results import Row
from benchmarks.text import IGNORED, Tokenizer, build_tokenizer, corpus, mask_tokens
from bridge import add_tvm_dispatch, stats

Batch = dict[str, Tensor]


def texts(tokenizer: Tokenizer, count: int, seed: int, longest: int = 200) -> list[list[int]]:
    """Texts of 3 to ``longest`` tokens from the corpus, of random lengths and places."""
    generator = torch.Generator().manual_seed(seed)
    stream = [token for document in corpus() for token in tokenizer.encode(document)]
    lengths = torch.randint(3, longest + 1, (count,), generator=generator).tolist()
    places = torch.randint(len(stream) - longest, (count,), generator=generator).tolist()
    return [stream[place : place + length] for place, length in zip(places, lengths, strict=True)]


def collate(batch: list[list[int]], vocabulary: int, generator: torch.Generator, length: int = 0) -> Batch:
    """A batch, padded to its longest or to ``length``."""
    length = length or max(map(len, batch))
    ids = torch.tensor([text[:length] + [0] * (length - len(text)) for text in batch])
    present = torch.tensor([[1] * min(len(text), length) + [0] * (length - len(text)) for text in batch])
    inputs, labels = mask_tokens(ids, vocabulary, generator)
    labels[0, 0] = ids[0, 0]  # a batch without a word to predict has no loss
    return {"input_ids": inputs, "attention_mask": present, "labels": labels.masked_fill(present == 0, IGNORED)}


def batches(data: list[list[int]], size: int, vocabulary: int, length: int = 0) -> Iterator[Batch]:
    """The batches of an epoch."""
    generator = torch.Generator().manual_seed(1)
    for start in range(0, len(data) - size + 1, size):
        yield collate(data[start : start + size], vocabulary, generator, length)


def epochs(*, quick: bool, with_inductor: bool, count: int | None = None) -> Row:
    """Seconds of an epoch of each peer without its first step, and entries and misses.

    ``count``: batches of an epoch, two or more.
    """
    size, count = (2, count or 5) if quick else (8, count or 41)
    options = {"hidden_size": 24, "num_attention_heads": 2, "intermediate_size": 32} if quick else {}
    width = options or {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024}
    tokenizer = build_tokenizer(corpus(), 60 if quick else 4000)
    vocabulary = len(tokenizer)
    data = texts(tokenizer, size * count, seed=0, longest=40 if quick else 200)
    padded = list(batches(data, size, vocabulary))
    mean = round(sum(batch["input_ids"].shape[1] for batch in padded) / len(padded))
    level = list(batches(data, size, vocabulary, mean))
    torch.manual_seed(0)
    config = BertConfig(vocab_size=vocabulary, num_hidden_layers=1 if quick else 4, **width)
    eager = BertForMaskedLM(config).train()
    dynamic, static = copy.deepcopy(eager), copy.deepcopy(eager)
    shapes = {name: {1: Dim("length", min=3, max=config.max_position_embeddings)} for name in padded[0]}
    add_tvm_dispatch(dynamic, sample_kwargs=padded[0], dynamic_shapes=shapes)
    add_tvm_dispatch(static, sample_kwargs=level[0])
    peers: dict[str, tuple[nn.Module, list[Batch]]] = {
        "eager": (eager, padded),
        "dynamic": (dynamic, padded),
        "static": (static, level),
    }
    if with_inductor:
        peers["inductor"] = torch.compile(copy.deepcopy(eager), dynamic=True), padded
    row = {"module": f"BertForMaskedLM, {len(padded)} batches of {size}, mean length {mean}"} | _run(peers)
    counted = stats(dynamic)
    return row | {"entries": len(counted.entries), "misses": sum(counted.misses.values())}


def _run(peers: dict[str, tuple[nn.Module, list[Batch]]]) -> Row:
    optimizers = {peer: torch.optim.AdamW(module.parameters(), 1e-4) for peer, (module, _) in peers.items()}
    seconds = dict.fromkeys(peers, 0.0)
    for index in range(len(next(iter(peers.values()))[1])):
        for peer, (module, given) in peers.items():
            started = time.perf_counter()
            optimizers[peer].zero_grad()
            module(**given[index]).loss.backward()
            optimizers[peer].step()
            seconds[peer] += (time.perf_counter() - started) * (index > 0)
    return {f"{peer}_epoch_s": spent for peer, spent in seconds.items()}
