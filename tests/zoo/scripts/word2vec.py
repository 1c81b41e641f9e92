"""word2vec: skip-gram with negative samples drawn by frequency."""

from collections import Counter
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn import functional as F


class SkipGram(nn.Module):
    def __init__(self, words, width=16):
        super().__init__()
        self.centre, self.context = nn.Embedding(words, width), nn.Embedding(words, width)

    def forward(self, centre, context, negatives):
        v = self.centre(centre)
        near = F.logsigmoid((v * self.context(context)).sum(-1))
        far = F.logsigmoid(-torch.bmm(self.context(negatives), v.unsqueeze(2)).squeeze(2)).sum(-1)
        return -(near + far).mean()


def train(dispatch):
    words = topics["assert"].lower().split()
    counts = Counter(words)
    ids = {word: i for i, word in enumerate(counts)}
    sequence = torch.tensor([ids[word] for word in words])
    frequency = torch.tensor([float(count) for count in counts.values()]) ** 0.75

    def batch(size=32):
        at = torch.randint(2, len(sequence) - 2, (size,))
        beside = torch.tensor([-2, -1, 1, 2])[torch.randint(4, (size,))]
        negatives = torch.multinomial(frequency, size * 5, replacement=True).view(size, 5)
        return sequence[at], sequence[at + beside], negatives

    model = SkipGram(len(ids))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    dispatch(model, batch())
    while True:
        loss = model(*batch())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss
