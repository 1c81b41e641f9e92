"""Loaded modules in a process that has no transformers: twenty steps of each, and the state after them.

    python -m tests.bridge.export.trained_elsewhere FOLDER…

prints JSON: losses and a digest of the state after them, by folder.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

STEPS = 20


def batch_of(kind: str, seed: int, device: torch.device | str = "cpu") -> dict[str, Any]:
    """A batch of the saved modules' shapes."""
    return {name: tensor.to(device) for name, tensor in _batch(kind, seed).items()}


def _batch(kind: str, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    if kind == "bert":
        ids = torch.randint(0, 61, (3, 7), generator=generator)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    if kind in ("mixed", "looped"):
        return {"x": torch.randn(3, 6, 4, generator=generator)}
    pixels = torch.randn(2, 3, 32, 32, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(0, 10, (2,), generator=generator)}


def trained(module: nn.Module, kind: str) -> dict[str, Any]:
    """The losses of training, and a digest of the state after it."""
    torch.manual_seed(1)
    device = next(module.parameters()).device
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        loss = module(**batch_of(kind, step, device)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    state = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        state.update(name.encode() + tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    drawn = int(torch.randint(1 << 30, (), device=device))
    return {"losses": losses, "state": state.hexdigest(), "generator": drawn}


def main(folders: list[str]) -> None:
    sys.modules["transformers"] = None  # as if it were not installed
    torch.backends.cudnn.deterministic = True
    from bridge import load_compiled

    print(json.dumps({folder: trained(load_compiled(folder), Path(folder).name) for folder in folders}))


if __name__ == "__main__":
    main(sys.argv[1:])
