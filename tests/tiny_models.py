"""A list of tiny models for ``python -m benchmarks public``, and some that something is wrong with."""

import os

import torch
from torch import Tensor, nn

from benchmarks.gpu_peers import Batch
from benchmarks.public_models import Classifier, PublicModel


class Decides(nn.Module):
    """NumPy computes between its layers: refused as a whole, dispatched in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.Linear(6, 5), nn.Tanh())
        self.after = nn.Sequential(nn.Linear(5, 3), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        order = x.detach().cpu().numpy()[:, 0].argsort()
        return self.after(x[torch.from_numpy(order)])


def _model() -> nn.Module:
    return Classifier(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Dropout(1e-30), nn.Linear(5, 3)))


def _raises() -> nn.Module:
    raise ValueError("no such sizes")


def _batch(rows: int) -> Batch:
    return Batch(kwargs={"images": torch.randn(rows, 6), "labels": torch.randint(0, 3, (rows,))})


MODELS = {
    "raises": PublicModel("one", 4, _raises, _batch),
    "dies": PublicModel("one", 4, os.abort, _batch),
    "first": PublicModel("one", 4, _model, _batch),
    "decides": PublicModel("other", 8, lambda: Classifier(Decides()), _batch),
    "large": PublicModel("other", 8, _model, _batch, left_out="too large"),
}
