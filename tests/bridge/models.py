"""Small modules for the tests of the bridge: BERT of tiny configurations and one module per contract of autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification, BertModel
from transformers.models.bert.modeling_bert import BertLayer

VOCABULARY = 61


def bert_config(*, attention: str = "eager", dropout: float = 0.1, layers: int = 2, **options: Any) -> BertConfig:
    """A BERT of width 24 with 3 heads; nothing is a power of two."""
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=24,
        num_hidden_layers=layers,
        num_attention_heads=3,
        intermediate_size=40,
        max_position_embeddings=40,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        **options,
    )
    config._attn_implementation = attention
    return config


def bert_layer(**options: Any) -> BertLayer:
    """One encoder layer in train mode."""
    return BertLayer(bert_config(**options)).train()


def bert_model(**options: Any) -> BertModel:
    return BertModel(bert_config(**options)).train()


def masked_lm(**options: Any) -> BertForMaskedLM:
    """Tied input and output embeddings."""
    return BertForMaskedLM(bert_config(**options)).train()


def classifier(**options: Any) -> BertForSequenceClassification:
    return BertForSequenceClassification(bert_config(num_labels=3, **options)).train()


class Applied(nn.Module):
    """A function, or an operator, of a layer's result; it is an attribute of the module."""

    def __init__(self, function: Any, width: int = 4, **options: Any):
        super().__init__()
        self.linear, self.function, self.options = nn.Linear(width, width), function, options

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x), **self.options).tanh()


def tokens(batch: int = 3, sequence: int = 17) -> Tensor:
    return torch.randint(0, VOCABULARY, (batch, sequence))


def padding(batch: int = 3, sequence: int = 17) -> Tensor:
    """Row ``i`` ends ``2 i`` tokens early, int64 [batch, sequence]; the first row is full."""
    lengths = torch.tensor([max(1, sequence - 2 * row) for row in range(batch)])
    return (torch.arange(sequence) < lengths[:, None]).long()


def masked_labels(ids: Tensor) -> Tensor:
    """The tokens at one position in three, -100 (ignored) elsewhere."""
    return ids.where(torch.arange(ids.shape[-1]) % 3 == 0, torch.full_like(ids, -100))


class MLP(nn.Module):
    def __init__(self, width: int = 6, hidden: int = 10, outputs: int = 4, dropout: float = 0.0):
        super().__init__()
        self.first = nn.Linear(width, hidden)
        self.dropout = nn.Dropout(dropout)
        self.second = nn.Linear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.dropout(F.gelu(self.first(x))))


class TwoOutputs(nn.Module):
    """Two outputs, each with a layer, after a shared layer."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(6, 5)
        self.left = nn.Linear(5, 3)
        self.right = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.shared(x))
        return self.left(hidden), self.right(hidden)


class NonDifferentiable(nn.Module):
    """A float output, the int64 position of its maximum, and a boolean comparison."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.linear(x)
        return y, y.argmax(-1), y > 0


class Frozen(MLP):
    def __init__(self):
        super().__init__()
        self.first.weight.requires_grad_(False)
        self.second.bias.requires_grad_(False)


class Tied(nn.Module):
    """One matrix is the embedding and the output projection."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.output = nn.Linear(6, 11, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, index: Tensor) -> Tensor:
        return self.output(torch.tanh(self.embedding(index)))


class ReturnsDict(TwoOutputs):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        left, right = super().forward(x)
        return {"right": right, "left": left}


class ReturnsList(TwoOutputs):
    def forward(self, x: Tensor) -> list[Tensor]:
        return list(super().forward(x))


class ReturnsNested(TwoOutputs):
    """Nested containers with ``None`` and numbers among the fields."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        left, right = super().forward(x)
        return {"loss": None, "parts": [left, {"inner": (right, None)}], "width": 5}


class ReturnsInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, torch.relu(self.linear(x))


class ReturnsTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.sigmoid(self.linear(x))
        return y, y


class ReturnsParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), self.linear.weight


class UsedTwice(nn.Module):
    """The weight multiplies twice, once transposed."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight) @ self.weight.t()


class Unused(MLP):
    """Owns a parameter and a layer that no call reads: eager leaves their gradients ``None``."""

    def __init__(self):
        super().__init__()
        self.spare = nn.Parameter(torch.randn(3))
        self.spare_layer = nn.Linear(2, 2)


class SharedSubmodule(nn.Module):
    """One layer object registered under two names."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.again = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.again(torch.tanh(self.first(x)))


class Detached(nn.Module):
    """Gradients stop at ``detach``; the value passes."""

    def __init__(self):
        super().__init__()
        self.target = nn.Linear(6, 5)
        self.online = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        target = self.target(x)
        return (self.online(x) - target.detach()).square(), target * target.detach()


class DetachedOutput(nn.Module):
    """The second output is differentiable nowhere although it is a float."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        return y, y.detach() * 2


class NoGradBlock(nn.Module):
    """A value computed under ``no_grad`` is a constant for autograd, also where it meets other operands."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Linear(6, 1)
        self.linear = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = torch.sigmoid(self.scale(x))
        return self.linear(x) * scale


class Counting(nn.Module):
    """Updates two buffers of its own at every call: a counter and a running mean."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 5)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        with torch.no_grad():
            self.steps.add_(1)
            self.mean.mul_(0.9).add_(0.1 * y.mean(0))
        return y - self.mean


class Branches(nn.Module):
    """Two independent dropouts whose order of drawing a compiler could swap, on shapes that differ."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(6, 9)
        self.narrow = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        narrow = F.dropout(self.narrow(x), 0.5, self.training)
        wide = F.dropout(self.wide(x), 0.25, self.training)
        return wide, narrow
