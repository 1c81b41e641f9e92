"""Speech recognition: Conv1d and GRU over frames, CTC loss over unaligned letters."""

import torch
from torch import nn
from torch.nn import functional as F


class Recognizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.gru = nn.Conv1d(8, 16, 3, stride=2, padding=1), nn.GRU(16, 12, batch_first=True)
        self.head = nn.Linear(12, 6)

    def forward(self, frames, letters, frame_counts, letter_counts):
        hidden, _ = self.gru(F.relu(self.conv(frames)).transpose(1, 2))
        log_probs = self.head(hidden).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(log_probs, letters, frame_counts, letter_counts, zero_infinity=True)


def train(dispatch):
    frames, letters = torch.randn(4, 8, 24), torch.randint(1, 6, (4, 5))
    counts = torch.tensor([12, 12, 10, 11]), torch.tensor([5, 4, 3, 5])
    model = Recognizer()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    dispatch(model, (frames, letters, *counts))
    while True:
        loss = model(frames + 0.1 * torch.randn_like(frames), letters, *counts)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss
