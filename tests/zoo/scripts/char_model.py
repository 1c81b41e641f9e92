"""A small GPT on characters: causal attention, tied embeddings, AdamW in groups, clipping, a schedule."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.zoo.data import text

CONTEXT, WIDTH, HEADS = 16, 32, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1))
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        b, t, c = x.size()
        q, k, v = (p.view(b, t, HEADS, c // HEADS).transpose(1, 2) for p in self.qkv(self.first(x)).split(c, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0, is_causal=True)
        x = x + self.drop(self.out(y.transpose(1, 2).contiguous().view(b, t, c)))
        return x + self.mlp(self.second(x))


class GPT(nn.Module):
    def __init__(self, letters):
        super().__init__()
        self.letters, self.positions = nn.Embedding(letters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, letters, bias=False)
        self.head.weight = self.letters.weight
        nn.init.normal_(self.letters.weight, std=0.02)

    def forward(self, tokens, targets=None):
        x = self.letters(tokens) + self.positions(torch.arange(tokens.size(1), device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


def train(dispatch):
    characters, letters = text()

    def batch():
        starts = torch.randint(len(characters) - CONTEXT, (4,)).tolist()
        x = torch.stack([characters[i : i + CONTEXT] for i in starts])
        return x, torch.stack([characters[i + 1 : i + 1 + CONTEXT] for i in starts])

    model = GPT(letters)
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    dispatch(model, batch())
    while True:
        _, loss = model(*batch())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        yield loss
