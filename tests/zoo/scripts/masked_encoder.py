"""Causal language model by ``nn.TransformerEncoder`` with ``generate_square_subsequent_mask``."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from tests.zoo.data import text

WIDTH, CONTEXT = 16, 12


class PositionalEncoding(nn.Module):
    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.1)
        position = torch.arange(CONTEXT).unsqueeze(1)
        rates = torch.exp(torch.arange(0, WIDTH, 2) * (-math.log(10000.0) / WIDTH))
        table = torch.zeros(CONTEXT, 1, WIDTH)
        table[:, 0, 0::2], table[:, 0, 1::2] = torch.sin(position * rates), torch.cos(position * rates)
        self.register_buffer("table", table)

    def forward(self, x):
        return self.dropout(x + self.table[: x.size(0)])


class LanguageModel(nn.Module):
    def __init__(self, letters):
        super().__init__()
        self.letters, self.positions = nn.Embedding(letters, WIDTH), PositionalEncoding()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.1), 2)
        self.head = nn.Linear(WIDTH, letters)

    def forward(self, tokens, mask=None):
        x = self.positions(self.letters(tokens) * math.sqrt(WIDTH))
        if mask is None:
            mask = nn.Transformer.generate_square_subsequent_mask(len(tokens))
        return self.head(self.encoder(x, mask))


def train(dispatch):
    characters, letters = text()
    columns = characters[: 300 * 4].view(4, -1).t().contiguous()
    model = LanguageModel(letters)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
    dispatch(model, (columns[:CONTEXT], mask))
    while True:
        for start in range(0, len(columns) - CONTEXT - 1, CONTEXT):
            logits = model(columns[start : start + CONTEXT], mask)
            target = columns[start + 1 : start + 1 + CONTEXT].reshape(-1)
            loss = F.cross_entropy(logits.view(-1, logits.shape[-1]), target)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            yield loss
