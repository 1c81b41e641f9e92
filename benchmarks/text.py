"""Text that ships with CPython, a word tokenizer, and masked language modelling batches.

The corpus is ``pydoc_data.topics``: the reference manual's chapters that ``help()`` shows, half a megabyte of English.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pydoc_data.topics import topics

import torch
from torch import Tensor

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
UNKNOWN, CLASSIFY, SEPARATOR, MASK = 1, 2, 3, 4
IGNORED = -100
"""The label that PyTorch's cross entropy leaves out."""

WORD = re.compile(r"[a-z]+|[0-9]|[^\sa-z0-9]")


@dataclass(frozen=True)
class Tokenizer:
    """Lower-cased words, digits and punctuation marks by frequency; the rest is ``[UNK]``."""

    vocabulary: dict[str, int]

    def __len__(self) -> int:
        return len(self.vocabulary)

    def encode(self, text: str) -> list[int]:
        """The token of every word of ``text``, without special tokens around it."""
        return [self.vocabulary.get(word, UNKNOWN) for word in WORD.findall(text.lower())]


def corpus() -> list[str]:
    """The documents, in the order of their names."""
    return [topics[name] for name in sorted(topics)]


def build_tokenizer(documents: list[str], size: int) -> Tokenizer:
    """The special tokens and the ``size - 5`` most frequent words, ties in alphabetical order.

    Raises:
        ValueError: ``size`` leaves no room for words.
    """
    if size <= len(SPECIAL):
        raise ValueError(f"a vocabulary of {size} is given, wanted more than the {len(SPECIAL)} special tokens")
    counts = Counter(word for document in documents for word in WORD.findall(document.lower()))
    ranked = sorted(counts, key=lambda word: (-counts[word], word))[: size - len(SPECIAL)]
    return Tokenizer({word: i for i, word in enumerate([*SPECIAL, *ranked])})


def sequences(tokenizer: Tokenizer, documents: list[str], length: int) -> Tensor:
    """Full sequences ``[CLS] … [SEP]`` of running text, int64 [count, length]; documents are joined by ``[SEP]``."""
    stream: list[int] = []
    for document in documents:
        stream += [*tokenizer.encode(document), SEPARATOR]
    inner = length - 2
    count = len(stream) // inner
    body = torch.tensor(stream[: count * inner]).reshape(count, inner)
    return torch.cat([body.new_full((count, 1), CLASSIFY), body, body.new_full((count, 1), SEPARATOR)], dim=1)


def mask_tokens(ids: Tensor, vocabulary_size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """BERT's masking: of the words, 15 % are to be predicted; 80 % of these read ``[MASK]``, 10 % another word.

    Returns:
        inputs and labels, both int64 of the shape of ``ids``; a label is ``IGNORED`` where nothing is predicted.
    """
    draw, kind = torch.rand(2, *ids.shape, generator=generator)
    random_words = torch.randint(len(SPECIAL), vocabulary_size, ids.shape, generator=generator)
    chosen = (draw < 0.15) & ((ids >= len(SPECIAL)) | (ids == UNKNOWN))
    labels = ids.masked_fill(~chosen, IGNORED)
    inputs = ids.masked_fill(chosen & (kind < 0.8), MASK)
    return torch.where(chosen & (kind >= 0.9), random_words, inputs), labels


def masked_batches(
    tokenizer: Tokenizer, documents: list[str], *, steps: int, batch: int, length: int, seed: int
) -> list[dict[str, Tensor]]:
    """``steps`` batches of random sequences, masked; keyword arguments of ``BertForMaskedLM``, int64 [batch, length].

    Everything is drawn from one generator of its own, so the default generator belongs to the model alone.
    """
    generator = torch.Generator().manual_seed(seed)
    data = sequences(tokenizer, documents, length)
    batches = []
    for _ in range(steps):
        rows = torch.randint(len(data), (batch,), generator=generator)
        inputs, labels = mask_tokens(data[rows], len(tokenizer), generator)
        batches.append({"input_ids": inputs, "labels": labels})
    return batches
