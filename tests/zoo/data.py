"""Real data that needs no download: digits of 8 x 8 pixels, and English text."""

from __future__ import annotations

import functools
from pydoc_data.topics import topics

import torch
from sklearn.datasets import load_digits
from torch import Tensor


@functools.cache
def _digits() -> tuple[Tensor, Tensor]:
    found = load_digits()
    return torch.tensor(found.images) / 16, torch.tensor(found.target)


def digits(count: int = 256) -> tuple[Tensor, Tensor]:
    """``(images, labels)``: ``(count, 1, 8, 8)`` in [0, 1] of the default type, and ``(count,)`` of int64."""
    images, labels = _digits()
    return images[:count, None].to(torch.get_default_dtype()), labels[:count]


def batches(*tensors: Tensor, size: int):
    """Endless batches of ``size`` rows, drawn from torch's generator."""
    while True:
        rows = torch.randint(len(tensors[0]), (size,))
        yield tuple(tensor[rows] for tensor in tensors)


@functools.cache
def text() -> tuple[Tensor, int]:
    """Python's own manual as int64 characters, and the number of different ones."""
    manual = "".join(topics[name] for name in sorted(topics)[:8])
    letters = {letter: i for i, letter in enumerate(sorted(set(manual)))}
    return torch.tensor([letters[letter] for letter in manual]), len(letters)
