"""``python -m tests.recurrent_grid``: recurrent networks of many lengths beside eager, every gradient at 1e-10.

Cells by hand (recorded, and as steps in the traced graph) and torch's layers, on the device of :mod:`tests.device`.
The suite has a part of it (tests/bridge/lowering/test_loops.py, tests/bridge/aten/test_recurrent.py).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from benchmarks.lstm import LayerNormLSTM
from benchmarks.recurrent_cells import GRU, LSTM, SelectiveScan
from bridge import UnsupportedModule, stats
from bridge.capture.loops import rolled
from tests.bridge.compare import check_module
from tests.device import DEVICE, factories_on
from tests.odd_cells import (
    AttentiveRNN,
    BeamDecoder,
    ConvLSTM,
    DeltaMemory,
    HaltingRNN,
    MambaBlock,
    NeuralODE,
    ZoneoutLSTM,
)

LENGTHS = (1, 2, 7, 64)
BATCH, WIDTH = 3, 8


class Dropping(nn.Module):
    """Two layers in a step, dropout on the input and between them."""

    def __init__(self, width: int):
        super().__init__()
        self.below, self.above, self.drop = nn.LSTMCell(width, width), nn.GRUCell(width, width), nn.Dropout(0.3)

    def forward(self, x):
        low = cell = high = x.new_zeros(x.shape[0], x.shape[2])
        states = []
        for step in range(x.shape[1]):
            low, cell = self.below(self.drop(x[:, step]), (low, cell))
            high = self.above(self.drop(low), high)
            states.append(high)
        return torch.stack(states, 1), cell


def _layer(kind: type[nn.RNNBase], **options) -> nn.Module:
    return kind(WIDTH, WIDTH, batch_first=True, **options)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "LSTM by hand": lambda: LSTM(WIDTH),
    "LayerNorm-LSTM": lambda: LayerNormLSTM(WIDTH),
    "GRU by hand": lambda: GRU(WIDTH),
    "selective scan": lambda: SelectiveScan(WIDTH),
    "dropout in the step": lambda: Dropping(WIDTH),
    "zoneout by a mask": lambda: ZoneoutLSTM(WIDTH),
    "attention over past states": lambda: AttentiveRNN(WIDTH),
    "ODE by Runge-Kutta": lambda: NeuralODE(WIDTH),
    "conv-LSTM": lambda: ConvLSTM(WIDTH),
    "Mamba block": lambda: MambaBlock(WIDTH),
    "beam decoder": lambda: BeamDecoder(WIDTH),
    "halting rows": lambda: HaltingRNN(WIDTH),
    "delta memory": lambda: DeltaMemory(WIDTH),
    **{f"nn.{kind.__name__}": partial(_layer, kind) for kind in (nn.LSTM, nn.GRU, nn.RNN)},
    **{
        f"nn.{kind.__name__}, two layers, both ways": partial(_layer, kind, num_layers=2, bidirectional=True)
        for kind in (nn.LSTM, nn.GRU, nn.RNN)
    },
    **{
        f"nn.{kind.__name__}, dropout between layers": partial(_layer, kind, num_layers=3, dropout=0.3)
        for kind in (nn.LSTM, nn.GRU, nn.RNN)
    },
    "nn.LSTM, projected": partial(_layer, nn.LSTM, num_layers=2, proj_size=5),
}


def checked(name: str, steps: int) -> str:
    """One network's outcome: same, refused, or WRONG with the difference."""
    try:
        module = check_module(NETWORKS[name], lambda: torch.randn(BATCH, steps, WIDTH, requires_grad=True), calls=1)
    except UnsupportedModule as error:
        return "refused: " + str(error).splitlines()[1].strip()
    except AssertionError as error:
        return "WRONG: " + " ".join(str(error).split())[:300]
    (entry,) = stats(module).entries
    return "same, recorded" if entry.lowered.captured.loop.is_recorded else "same"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.recurrent_grid", description=__doc__)
    parser.add_argument("--only", default="", help="networks whose name contains this")
    parser.add_argument("--steps", default=",".join(map(str, LENGTHS)), help="lengths")
    parser.add_argument("--record", action="store_true", help="loops of few operators are recorded, too")
    options = parser.parse_args(argv)
    if options.record:
        rolled.LEAST_ROWS = 1
    started, counts = time.perf_counter(), {}
    for name in NETWORKS:
        for steps in map(int, options.steps.split(",")) if options.only in name else ():
            with factories_on(DEVICE):
                found = checked(name, steps)
            counts[found.partition(":")[0]] = counts.get(found.partition(":")[0], 0) + 1
            print(f"{name}, {steps} steps: {found}", flush=True)
    print(", ".join(f"{count} {what}" for what, count in counts.items()), f"in {time.perf_counter() - started:.0f} s")
    return 1 if "WRONG" in counts else 0


if __name__ == "__main__":
    sys.exit(main())
