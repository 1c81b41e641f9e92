"""The README's picture: a small residual block → its forward and backward as SVG, drawn by ``visualize``.

``python -m notebooks.picture docs/split.svg`` writes it; it needs graphviz itself, the program ``dot``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bridge import lower, visualize
from notebooks.svg import small_svg


class Block(nn.Module):
    """LayerNorm(x + dropout(MLP(x)))."""

    def __init__(self, width: int):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.drop(self.down(F.gelu(self.up(x)))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("path", type=Path, help="the SVG file to write")
    path = parser.parse_args().path
    torch.manual_seed(0)
    lowered = lower(Block(256), torch.randn(64, 256, requires_grad=True))
    picture = visualize(lowered, "split", kernels=True)
    path.write_text(small_svg(picture.pipe(format="svg", encoding="utf-8")), encoding="utf-8")
    print(f"{path}: {path.stat().st_size} bytes, {len(lowered.plan.saved_tensors)} saved tensors")


if __name__ == "__main__":
    main()
