"""Losses in blocks of rows: memory and time of a head's step beside eager's, with blocks and without."""

from __future__ import annotations

import argparse
import os
import time
from statistics import median
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.peak import arena_bytes, peak_of

HEADER = "rows x columns x words, eager MiB, whole MiB, blocks MiB, blocks / whole, eager ms, whole ms, blocks ms"

SIZES = ((2048, 128, 16000), (4096, 256, 32000))


class Head(nn.Module):
    """Logits over words, and their cross-entropy."""

    def __init__(self, columns: int, words: int):
        super().__init__()
        self.head = nn.Linear(columns, words, bias=False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(x), labels)


def measure(rows: int, columns: int, words: int, repeat: int) -> str:
    """A row of the table."""
    from autodiff import row_blocks
    from bridge import add_tvm_dispatch
    from bridge.base.session import SESSION

    torch.manual_seed(0)
    x, labels = torch.randn(rows, columns, requires_grad=True), torch.randint(0, words, (rows,))
    peers = {"eager": Head(columns, words)}
    for name, least in (("whole", 1 << 60), ("blocks", 0)):
        SESSION.reset("lowerings")
        peers[name] = Head(columns, words)
        with mock.patch.object(row_blocks, "LEAST_SAVED", least):
            add_tvm_dispatch(peers[name], (x, labels))

    def step(module: nn.Module) -> float:
        module.zero_grad()
        x.grad = None
        started = time.perf_counter()
        module(x, labels).backward()
        return 1e3 * (time.perf_counter() - started)

    held, spent = {}, {name: [] for name in peers}
    for name, module in peers.items():
        step(module)
        held[name] = peak_of(lambda module=module: step(module)) + (name != "eager" and arena_bytes([module]))
    for _ in range(repeat):
        for name, module in peers.items():
            spent[name].append(step(module))
    cells = [f"{rows} x {columns} x {words}", *(f"{each / 2**20:.0f}" for each in held.values())]
    cells += [f"**{held['blocks'] / held['whole']:.2f}**", *(f"{median(each):.0f}" for each in spent.values())]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    os.environ["BRIDGE_CACHE"] = "0"  # its key ignores the threshold
    torch.set_num_threads(options.threads)
    columns = HEADER.split(", ")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for size in SIZES:
        print(measure(*size, options.repeat), flush=True)


if __name__ == "__main__":
    main()
