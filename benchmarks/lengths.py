"""Tokens per second of a HuggingFace loop on a GPU, each batch padded to its own longest text.

    python -m benchmarks lengths                                    # all peers, batches of 16 texts of 3 to 200 tokens
    python -m benchmarks lengths --peers eager ours --seconds 20    # some peers, for 20 seconds

A step is ``model(**batch).loss.backward()``, fused AdamW, ``zero_grad``; batches come from pinned memory. Peers:

    ours              dispatched with a dynamic length; ``off``: the same with ``cuda_graphs=False``
    fixed             dispatched for the mean padded length, and fed with batches of that length
    eager             ``inductor``: ``torch.compile(dynamic=True)``; ``reduce-overhead``: that mode of it

All are in one process, each with a copy of one model, and take turns of a few equal batches each. Compilation is
left out (the first batches, of three lengths); other costs of a new length are not. The last column is the last
quarter of the turns, when most lengths have occurred before. ``--batches grouped``: the texts of a batch are about
equally long, so that all lengths are equally frequent; otherwise the longest of 16 decides, and most batches are
long.
"""

from __future__ import annotations

import argparse
import copy
import random
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from transformers import BertConfig, BertForMaskedLM

from bridge import add_tvm_dispatch, stats

PEERS = ("ours", "fixed", "eager", "inductor", "reduce-overhead", "off")
VOCABULARY = 4096
SHORTEST, LONGEST, TEXTS = 3, 200, 16
TURN = 10
"""Batches per turn."""

Batch = dict[str, Tensor]


def lengths(kind: str, seed: int) -> Iterator[int]:
    """The longest text's length of each batch."""
    generator = random.Random(seed)
    while True:
        texts = [generator.randint(SHORTEST, LONGEST) for _ in range(1 if kind == "grouped" else TEXTS)]
        yield max(texts)


def batch(length: int, seed: int) -> Batch:
    """A batch whose longest text has this length, in pinned memory."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, VOCABULARY, (TEXTS, length), generator=generator)
    own = torch.randint(min(SHORTEST, length), length + 1, (TEXTS, 1), generator=generator)
    own[0] = length
    present = torch.arange(length) < own
    labels = ids.masked_fill(~present | (torch.rand(ids.shape, generator=generator) > 0.15), -100)
    labels[0, 0] = ids[0, 0]  # a batch without a word to predict has no loss
    made = {"input_ids": ids.masked_fill(~present, 0), "attention_mask": present.long(), "labels": labels}
    return {name: tensor.pin_memory() for name, tensor in made.items()}


@dataclass
class Peer:
    """A model in training, with the tokens (padding counted) and seconds of each turn."""

    module: nn.Module
    length: int | None = None
    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.module.parameters(), 1e-4, fused=True)

    def step(self, given: Batch) -> None:
        there = {name: tensor.to("cuda", non_blocking=True) for name, tensor in given.items()}
        self.module(**there).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def turn(self, given: list[Batch]) -> None:
        torch.cuda.synchronize()
        started = time.perf_counter()
        for each in given:
            self.step(each)
        torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - started)
        self.tokens.append(sum(each["input_ids"].numel() for each in given))

    def speed(self, begin: float = 0.0) -> float:
        """Tokens per second, from a share of the turns on."""
        first = int(begin * len(self.tokens))
        return sum(self.tokens[first:]) / sum(self.seconds[first:])


def peers(names: list[str], layers: int, width: int, mean: int, attention: str) -> dict[str, Peer]:
    """The peers, compiled."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": width // 64}
    sizes["attn_implementation"] = attention
    config = BertConfig(vocab_size=VOCABULARY, intermediate_size=4 * width, **sizes)
    model = BertForMaskedLM(config).cuda().train()
    sample = {name: tensor.cuda() for name, tensor in batch(67, 0).items()}
    shapes = {name: {1: Dim("length", min=SHORTEST, max=config.max_position_embeddings)} for name in sample}
    level = {name: tensor.cuda() for name, tensor in batch(mean, 0).items()}
    makers: dict[str, Callable[[nn.Module], nn.Module]] = {
        "ours": lambda module: add_tvm_dispatch(module, sample_kwargs=sample, dynamic_shapes=shapes),
        "off": lambda module: add_tvm_dispatch(module, sample_kwargs=sample, dynamic_shapes=shapes, cuda_graphs=False),
        "fixed": lambda module: add_tvm_dispatch(module, sample_kwargs=level),
        "eager": lambda module: module,
        "inductor": lambda module: torch.compile(module, dynamic=True),
        "reduce-overhead": lambda module: torch.compile(module, mode="reduce-overhead", dynamic=True),
    }
    made = {}
    for name in names:
        started = time.perf_counter()
        try:
            peer = Peer(makers[name](copy.deepcopy(model)), mean if name == "fixed" else None)
            for length in (67, 120, 41):
                peer.step(batch(peer.length or length, 1))
            torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001 - the other peers go on
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
            continue
        made[name] = peer
        print(f"{name}: {time.perf_counter() - started:.1f} s until three steps were taken", flush=True)
    return made


def show(running: dict[str, Peer]) -> None:
    """Prints the results of the turns so far."""
    first, *_ = running.values()
    print(f"{TURN * len(first.tokens)} batches each; tokens per second, and {next(iter(running))} / peer")
    print("| peer | all | last quarter |\n|---|---:|---:|")
    for name, peer in running.items():
        cells = [f"{peer.speed(part):.0f} ({first.speed(part) / peer.speed(part):.2f})" for part in (0.0, 0.75)]
        print(f"| {name} | {cells[0]} | {cells[1]} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS[:-1]))
    parser.add_argument("--batches", choices=("padded", "grouped"), default="padded")
    parser.add_argument("--seconds", type=float, default=30.0, help="so long turns are taken")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--attention", choices=("sdpa", "eager"), default="sdpa", help="older torch: eager")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    drawn = lengths(options.batches, 1)
    mean = round(sum(next(drawn) for _ in range(1000)) / 1000)
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    print(f"{machine}, {options.batches}, mean length {mean}", flush=True)
    running = peers(options.peers, options.layers, options.width, mean, options.attention)
    drawn, begin, seed = lengths(options.batches, 2), time.perf_counter(), 100
    for part in (0.5, 1.0):  # also a table at half of the time
        while time.perf_counter() < begin + part * options.seconds:
            seeds, seed = range(seed, seed + TURN), seed + TURN
            given = [batch(next(drawn), each) for each in seeds]
            level = [batch(mean, each) for each in seeds] if "fixed" in running else []
            for peer in running.values():
                peer.turn(given if peer.length is None else level)
        show(running)
    for name in {"ours", "fixed"} & running.keys():
        told = stats(running[name].module)
        print(f"{name}: {told.hits} hits, misses {dict(told.misses)}, {told.graphs}")
    print(f"{torch.cuda.memory_allocated() >> 20} MiB allocated, {torch.cuda.memory_reserved() >> 20} MiB reserved")


if __name__ == "__main__":
    main()
