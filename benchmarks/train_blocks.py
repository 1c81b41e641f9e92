"""Forward and backward of the blocks that people train: ours beside eager PyTorch and, on request, torch.compile.

The peers take turns in one process (A B C A B C ...), each on a copy of the same module with the same input; the table
shows medians and ratios. These are shared machines: read the ratios, not the milliseconds.

    python -m benchmarks.train_blocks --compile --json benchmarks/results/train_blocks.json
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BertConfig, ConvNextConfig, GPT2Config, LlamaConfig
from transformers.models.bert.modeling_bert import BertLayer
from transformers.models.convnext.modeling_convnext import ConvNextLayer
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from benchmarks.results import Results, Row, machine, versions
from benchmarks.tables import FORMS, header, line
from bridge import add_tvm_dispatch, stats
from bridge.compile import clear_cache, clear_choices, host_backend
from bridge.compile.cpu.measure import seconds_of
from bridge.compile.cpu.product_ways import Trial

WARM_UP = 3


def bert_layer() -> nn.Module:
    return BertLayer(BertConfig(attn_implementation="eager"))


def gpt2_block() -> nn.Module:
    config = GPT2Config(attn_implementation="eager")
    config._attn_implementation = "eager"
    return GPT2Block(config, layer_idx=0)


class LlamaBlock(nn.Module):
    """A decoder layer with its rotary embedding, a function of the hidden states alone."""

    def __init__(self):
        super().__init__()
        config = LlamaConfig(hidden_size=768, intermediate_size=2048, num_attention_heads=12, num_key_value_heads=12)
        config._attn_implementation = "eager"
        self.layer = LlamaDecoderLayer(config, layer_idx=0)
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1])[None]
        return self.layer(x, position_embeddings=self.rotary(x, positions))


def gelu_mlp() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(768), nn.Linear(768, 3072), nn.GELU(), nn.Linear(3072, 768), nn.Dropout(0.1))


class LayerNormLSTM(nn.Module):
    """The cell of Ba, Kiros and Hinton, "Layer Normalization" (2016), over all steps of [batch, steps, width]."""

    def __init__(self, width: int):
        super().__init__()
        self.from_input = nn.Linear(width, 4 * width, bias=False)
        self.from_state = nn.Linear(width, 4 * width, bias=False)
        self.norm_input, self.norm_state = nn.LayerNorm(4 * width), nn.LayerNorm(4 * width)
        self.norm_cell = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        state = cell = x.new_zeros(x.shape[0], x.shape[2])
        states = []
        for step in range(x.shape[1]):
            gates = self.norm_input(self.from_input(x[:, step])) + self.norm_state(self.from_state(state))
            enter, forget, new, leave = gates.chunk(4, dim=-1)
            cell = torch.sigmoid(forget) * cell + torch.sigmoid(enter) * torch.tanh(new)
            state = torch.sigmoid(leave) * torch.tanh(self.norm_cell(cell))
            states.append(state)
        return torch.stack(states, dim=1)


def convnext_block() -> nn.Module:
    return ConvNextLayer(ConvNextConfig(), dim=96)


BLOCKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "BertLayer (1, 14)": (bert_layer, (1, 14, 768)),
    "BertLayer (1, 128)": (bert_layer, (1, 128, 768)),
    "BertLayer (8, 128)": (bert_layer, (8, 128, 768)),
    "GPT-2 block (4, 128)": (gpt2_block, (4, 128, 768)),
    "LLaMA block (4, 128)": (LlamaBlock, (4, 128, 768)),
    "GELU-MLP (1024)": (gelu_mlp, (1024, 768)),
    "ConvNeXt block (4, 96, 56, 56)": (convnext_block, (4, 96, 56, 56)),
    "LayerNorm-LSTM (64, 100 steps, 512)": (lambda: LayerNormLSTM(512), (64, 100, 512)),
}


def step(module: nn.Module, x: Tensor, grad: Tensor) -> float:
    """Seconds of one forward and backward; gradients are new at each step, as after ``optimizer.zero_grad()``."""
    module.zero_grad()
    x.grad = None
    started = time.perf_counter()
    y = module(x)
    y = y[0] if isinstance(y, tuple) else y
    y.backward(grad)
    return time.perf_counter() - started


class _Products(TorchDispatchMode):
    """Collects the matrix products that run under it: operands, and memory for the result."""

    def __init__(self) -> None:
        super().__init__()
        self.trials: list[Trial] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("mm", "bmm", "addmm", "baddbmm"):
            matrices = [*(arg.detach() for arg in args[-2:]), torch.empty_like(result)]
            self.trials.append(Trial(*(matrix if matrix.ndim == 3 else matrix[None] for matrix in matrices)))
        return result


def products(module: nn.Module, x: Tensor, grad: Tensor) -> dict[str, Callable[[], float]]:
    """Two floors: only the products of a step, into memory that is there; by torch's own kernels, and each by the way
    that is fastest for it."""
    with _Products() as found:
        step(module, x, grad)
    policy = host_backend().products(torch.get_num_threads(), deterministic=False)
    torchs, best = [], []
    for trial in found.trials:
        runs = policy.runs(trial.shape, trial, policy.ways(trial.shape))
        times = seconds_of(runs)
        torchs.append(runs[next(iter(runs))])
        best.append(runs[min(times, key=times.__getitem__)])

    def seconds(calls: list[Callable[[], None]]) -> float:
        started = time.perf_counter()
        for call in calls:
            call()
        return time.perf_counter() - started

    return {"products": partial(seconds, torchs), "best_products": partial(seconds, best)}


def measure(name: str, rounds: int, with_compile: bool) -> Row:
    """One row of the table: medians in milliseconds, first steps in seconds."""
    make, shape = BLOCKS[name]
    torch.manual_seed(0)
    eager = make().train()
    x, grad = torch.randn(shape, requires_grad=True), torch.randn(shape)
    clear_cache()
    clear_choices()
    dispatched = copy.deepcopy(eager)
    started = time.perf_counter()
    add_tvm_dispatch(dispatched, x)
    step(dispatched, x, grad)
    row: Row = {"block": name, "ours_first_s": time.perf_counter() - started}
    peers = {"eager": eager, "ours": dispatched}
    if with_compile:
        compiled = torch.compile(copy.deepcopy(eager))
        started = time.perf_counter()
        step(compiled, x, grad)
        row["torch_compile_first_s"] = time.perf_counter() - started
        peers["torch_compile"] = compiled
    runs = {peer: partial(step, module, x, grad) for peer, module in peers.items()}
    runs |= products(eager, x, grad)
    times: dict[str, list[float]] = {peer: [] for peer in runs}
    for _ in range(rounds + WARM_UP):
        for peer, run in runs.items():
            times[peer].append(run())
    assert not stats(dispatched).misses, stats(dispatched)
    return row | {f"{peer}_ms": 1e3 * statistics.median(values[WARM_UP:]) for peer, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="blocks whose name contains this")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--compile", action="store_true", help="torch.compile as a third peer")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, too")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    print(f"forward + backward, float32, medians of {options.rounds}; {versions()}; {machine()}\n")
    columns = FORMS["blocks"]
    print(header(columns))
    rows, floors = [], []
    for name in BLOCKS:
        if options.only in name:
            rows.append(measure(name, options.rounds, options.compile))
            print(line(columns, rows[-1]), flush=True)
            best = float(rows[-1]["best_products_ms"])
            floors.append(f"{name}: {best:.2f} ms, ours / best {float(rows[-1]['ours_ms']) / best:.2f}")
    print("\nThe products alone, each by the way that is fastest for it:", *floors, sep="\n")
    if options.json:
        command = f"python -m benchmarks.train_blocks{' --compile' if options.compile else ''}"
        Results.of("train_blocks", command, rows).save(options.json)


if __name__ == "__main__":
    main()
