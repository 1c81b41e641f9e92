"""Forward and backward of common training blocks: ours beside eager PyTorch and, on request, torch.compile.

The peers take turns in one process (A B C A B C ...), each on a copy of the same module with the same input; the table
shows medians and ratios. Shared machines: read the ratios, not the milliseconds.

    python -m benchmarks.train_blocks --compile --json benchmarks/results/train_blocks.json

``--autocast bf16``: every peer under autocast. ``--foreign-threads 12``: eager and ours once more beside 12 other
Python threads, half of them at work (:mod:`benchmarks.foreign_threads`), and the ratio.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
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

from benchmarks.foreign_threads import foreign_threads
from benchmarks.lstm import LayerNormLSTM
from benchmarks.results import Results, Row, machine, versions
from benchmarks.tables import FORMS, header, line
from bridge import add_tvm_dispatch, stats
from bridge.base.session import SESSION
from bridge.compile import host_backend
from bridge.compile.cpu.products import ProductTrial
from bridge.trials import seconds_of

WARM_UP = 3


def bert_layer(attention: str = "eager") -> nn.Module:
    return BertLayer(BertConfig(attn_implementation=attention))


def gpt2_block(attention: str = "eager") -> nn.Module:
    config = GPT2Config(attn_implementation=attention)
    config._attn_implementation = attention
    return GPT2Block(config, layer_idx=0)


class LlamaBlock(nn.Module):
    """A decoder layer with its rotary embedding, a function of the hidden states alone."""

    def __init__(self, attention: str = "eager"):
        super().__init__()
        config = LlamaConfig(hidden_size=768, intermediate_size=2048, num_attention_heads=12, num_key_value_heads=12)
        config._attn_implementation = attention
        self.layer = LlamaDecoderLayer(config, layer_idx=0)
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device)[None]
        return self.layer(x, position_embeddings=self.rotary(x, positions))


def gelu_mlp() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(768), nn.Linear(768, 3072), nn.GELU(), nn.Linear(3072, 768), nn.Dropout(0.1))


def convnext_block() -> nn.Module:
    return ConvNextLayer(ConvNextConfig(), dim=96)


BLOCKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "BertLayer (1, 14)": (bert_layer, (1, 14, 768)),
    "BertLayer (1, 128)": (bert_layer, (1, 128, 768)),
    "BertLayer (8, 128)": (bert_layer, (8, 128, 768)),
    "BertLayer (32, 128)": (bert_layer, (32, 128, 768)),
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
    y.backward(grad.to(y.dtype))
    return time.perf_counter() - started


def beside_threads(count: int, run: Callable[[], float]) -> float:
    """Seconds of a step beside ``count`` other threads."""
    with foreign_threads(count):
        return run()


class _Products(TorchDispatchMode):
    """Collects the matrix products that run under it: operands, and memory for the result."""

    def __init__(self) -> None:
        super().__init__()
        self.trials: list[ProductTrial] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("mm", "bmm", "addmm", "baddbmm"):
            matrices = [*(arg.detach() for arg in args[-2:]), torch.empty_like(result)]
            self.trials.append(ProductTrial(*(matrix if matrix.ndim == 3 else matrix[None] for matrix in matrices)))
        return result


def products(module: nn.Module, x: Tensor, grad: Tensor) -> dict[str, Callable[[], float]]:
    """Two lower bounds: only a step's matrix products, into existing memory: by torch's own kernels, and by the fastest
    algorithm for each."""
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


def measure(name: str, rounds: int, with_compile: bool, foreign: int = 0) -> Row:
    """One row of the table: medians in milliseconds, first steps in seconds.

    ``foreign``: number of other threads beside eager and ours, in rounds of their own.
    """
    make, shape = BLOCKS[name]
    torch.manual_seed(0)
    eager = make().train()
    x, grad = torch.randn(shape, requires_grad=True), torch.randn(shape)
    SESSION.reset("programs", "choices")
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
    runs: dict[str, Callable[[], float]] = {peer: partial(step, module, x, grad) for peer, module in peers.items()}
    if foreign:
        runs |= {f"{peer}_beside_threads": partial(beside_threads, foreign, runs[peer]) for peer in ("eager", "ours")}
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
    parser.add_argument("--compile", "--inductor", action="store_true", help="torch.compile as a third peer")
    parser.add_argument("--threads", type=int, metavar="N", help="torch.set_num_threads(N)")
    parser.add_argument("--foreign-threads", type=int, default=0, metavar="N", help="also beside N other threads")
    parser.add_argument("--autocast", choices=("bf16",), help="every peer under torch.autocast")
    parser.add_argument("--quick", action="store_true", help="the smallest block, two rounds: does it work")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, too")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.quick:
        options.only, options.rounds = options.only or "BertLayer (1, 14)", 2
    numbers = "bfloat16 autocast" if options.autocast else "float32"
    print(f"forward + backward, {numbers}, medians of {options.rounds}; {versions()}; {machine()}\n")
    columns = FORMS["blocks"]
    print(header(columns))
    rows, notes = [], []
    with torch.autocast("cpu", torch.bfloat16, enabled=bool(options.autocast)):
        for name in BLOCKS:
            if options.only in name:
                rows.append(measure(name, options.rounds, options.compile, options.foreign_threads))
                print(line(columns, rows[-1]), flush=True)
                notes.append(note(rows[-1]))
    print("\nThe products alone, each by the way that is fastest for it:", *notes, sep="\n")
    if options.json:
        command = " ".join(["python -m benchmarks.train_blocks", *_without_json(sys.argv[1:])])
        Results.of("train_blocks", command, rows).save(options.json)


def note(row: Row) -> str:
    """Information without a column in the table."""
    best, ours, beside = row["best_products_ms"], row["ours_ms"], row.get("ours_beside_threads_ms")
    text = f"{row['block']}: {best:.2f} ms, ours / best {ours / best:.2f}"
    if beside is None:
        return text
    eager = row["eager_beside_threads_ms"] / row["eager_ms"]
    return f"{text}; beside other threads / without: ours {beside / ours:.2f}, eager {eager:.2f}"


def _without_json(arguments: list[str]) -> list[str]:
    """The options of the measurement."""
    place = arguments.index("--json") if "--json" in arguments else len(arguments)
    return arguments[:place] + arguments[place + 2 :]


if __name__ == "__main__":
    main()
