"""Speech from text: dilated, gated Conv1d blocks with weight norm; characters to mel frames, L1 loss over lengths."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm


class Gated(nn.Module):
    def __init__(self, channels, dilation):
        super().__init__()
        self.conv = weight_norm(nn.Conv1d(channels, 2 * channels, 3, padding=dilation, dilation=dilation))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return (x + F.glu(self.conv(self.dropout(x)), 1)) * 0.5**0.5


class Speech(nn.Module):
    def __init__(self):
        super().__init__()
        self.letters = nn.Embedding(30, 16)
        self.encoder = nn.Sequential(Gated(16, 1), Gated(16, 2))
        self.stretch = nn.ConvTranspose1d(16, 16, 4, stride=2, padding=1)
        self.decoder = nn.Sequential(Gated(16, 1), nn.Conv1d(16, 12, 1))

    def forward(self, letters):
        return self.decoder(self.stretch(self.encoder(self.letters(letters).transpose(1, 2))))


def train(dispatch):
    letters, mel = torch.randint(0, 30, (4, 10)), torch.randn(4, 12, 20)
    heard = torch.arange(20) < torch.tensor([20, 16, 12, 18])[:, None]
    model = Speech()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    dispatch(model, letters)
    while True:
        off = (model(letters) - mel).abs() * heard.unsqueeze(1)
        loss = off.sum() / heard.sum() / 12
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss
