"""Translation by ``nn.Transformer``: a causal mask for the target, padding masks for both, teacher forcing."""

import torch
from torch import nn

VOCABULARY, PADDING, WIDTH = 20, 0, 16


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.letters, self.positions = nn.Embedding(VOCABULARY, WIDTH, padding_idx=PADDING), nn.Embedding(12, WIDTH)
        self.transformer = nn.Transformer(WIDTH, 2, 1, 1, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def embed(self, tokens):
        return self.letters(tokens) + self.positions(torch.arange(tokens.shape[1]))

    def forward(self, source, target):
        source_padding, target_padding = source == PADDING, target == PADDING
        causal = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)
        hidden = self.transformer(
            self.embed(source),
            self.embed(target),
            tgt_mask=causal,
            src_key_padding_mask=source_padding,
            tgt_key_padding_mask=target_padding,
            memory_key_padding_mask=source_padding,
        )
        return self.head(hidden)


def batch():
    source = torch.randint(2, VOCABULARY, (8, 10))
    source[torch.arange(10) >= torch.randint(5, 11, (8, 1))] = PADDING
    return source, torch.cat([torch.ones(8, 1, dtype=torch.long), source.flip(1)], 1)


def train(dispatch):
    model = Translator()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.98))
    criterion = nn.CrossEntropyLoss(ignore_index=PADDING)
    source, target = batch()
    dispatch(model, (source, target[:, :-1]))
    while True:
        source, target = batch()
        logits = model(source, target[:, :-1])
        loss = criterion(logits.reshape(-1, VOCABULARY), target[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss
