"""BERT-base inference beside eager, torch.jit.trace and torch.compile: frozen calls of three sizes, by turns.

Every peer answers the same batch, in turn, round after round, in alternating order. Reports each peer's median and the
median, over rounds, of ours divided by the fastest other peer's time in that round, which a temporarily busy machine
disturbs least. Logits are compared before the timing. A peer that does not run is left out, and named.

    python -m benchmarks inference --json benchmarks/results/inference.json
    python -m benchmarks inference --device cuda --only 1x328
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel

from benchmarks.results import Results, Row, machine, versions
from benchmarks.tables import FORMS, header, line
from bridge import add_tvm_dispatch, stats

SIZES = {"1x14": (1, 14), "1x328": (1, 328), "32x328": (32, 328)}
"""Batch and tokens."""

WARM_UP, WARM_UP_SECONDS = 3, 2.0
"""Untimed calls of each peer, and seconds after which they end."""
FEWEST, MOST = 3, 200
"""Bounds of the number of rounds."""

SMALL = {"hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 40, "num_hidden_layers": 2, "vocab_size": 61}


class Encoder(nn.Module):
    """BERT with tensors as arguments and as its result, as ``torch.jit.trace`` requires."""

    def __init__(self, config: BertConfig):
        super().__init__()
        self.bert = BertModel(config)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


@dataclass(frozen=True)
class Peer:
    """A model that answers batches: ``call``: ids and mask → hidden states; seconds until its first answer."""

    call: Callable[..., Tensor]
    first_seconds: float


def ours(module: nn.Module, batch: tuple[Tensor, ...]) -> Callable[..., Tensor]:
    graphs = "auto" if batch[0].is_cuda else False
    return add_tvm_dispatch(module, batch, freeze=True, cuda_graphs=graphs)


def traced(module: nn.Module, batch: tuple[Tensor, ...]) -> Callable[..., Tensor]:
    return torch.jit.freeze(torch.jit.trace(module, batch))


def compiled(mode: str | None) -> Callable[..., Callable[..., Tensor]]:
    return lambda module, batch: torch.compile(module, mode=mode)


PEERS: dict[str, Callable[..., Callable[..., Tensor]]] = {
    "eager": lambda module, batch: module,
    "jit": traced,
    "compile": compiled(None),
    "autotune": compiled("max-autotune"),
    "ours": ours,
}
"""By name, functions that make a callable of a module for a batch."""


def finish(device: torch.device) -> None:
    """Waits for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def made(name: str, module: nn.Module, batch: tuple[Tensor, ...]) -> Peer | None:
    """The peer after its first calls; ``None``, with a printed line, if it does not run or its answer differs."""
    wanted = module(*batch)
    started = time.perf_counter()
    try:
        call = PEERS[name](copy.deepcopy(module), batch)
        answer = call(*batch)
        finish(wanted.device)
        seconds = time.perf_counter() - started
        print(f"{name}: first answer after {seconds:.1f} s", file=sys.stderr, flush=True)
        torch.testing.assert_close(answer, wanted, rtol=1e-3, atol=1e-3)
        started = time.perf_counter()
        for _ in range(WARM_UP):
            if time.perf_counter() - started < WARM_UP_SECONDS:
                call(*batch)
    except Exception as error:
        if name == "ours":
            raise
        print(f"{name} is left out: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        return None
    return Peer(call, seconds)


def by_turns(peers: dict[str, Peer], batch: tuple[Tensor, ...], seconds: float) -> dict[str, list[float]]:
    """Milliseconds of each peer, round by round, for about ``seconds``."""
    times: dict[str, list[float]] = {name: [] for name in peers}
    names, begun, device = list(peers), time.perf_counter(), batch[0].device
    for turn in range(MOST):
        if turn >= FEWEST and time.perf_counter() - begun > seconds:
            break
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            finish(device)
            started = time.perf_counter()
            peers[name].call(*batch)
            finish(device)
            times[name].append(1e3 * (time.perf_counter() - started))
    return times


def row_of(size: str, times: dict[str, list[float]], peers: dict[str, Peer]) -> Row:
    """Medians, and ours relative to the fastest other peer."""
    row: Row = {"module": f"BERT-base {size}"}
    for name, spent in times.items():
        row[f"{name}_ms"] = statistics.median(spent)
        row[f"{name}_first_s"] = peers[name].first_seconds
    others = [name for name in times if name != "ours"]
    if others:
        row["best"] = min(others, key=lambda name: row[f"{name}_ms"])
        rounds = zip(times["ours"], times[row["best"]], strict=True)
        row["ours_to_best"] = statistics.median(mine / best for mine, best in rounds)
    row["rounds"] = len(times["ours"])
    return row


def measure(size: str, options: argparse.Namespace) -> Row:
    """One row of the table."""
    torch.manual_seed(0)
    torch.compiler.reset()
    config = BertConfig(**(SMALL if options.quick else {}), attn_implementation="sdpa")
    module = Encoder(config).eval().to(options.device)
    count, length = SIZES[size]
    if options.quick:
        count, length = min(count, 2), max(length // 16, 3)
    ids = torch.randint(0, config.vocab_size, (count, length), device=options.device)
    batch = ids, torch.ones_like(ids)
    with torch.inference_mode() if options.inference_mode else torch.no_grad():
        found = {name: made(name, module, batch) for name in options.peers}
        peers = {name: peer for name, peer in found.items() if peer is not None}
        times = by_turns(peers, batch, 0.0 if options.quick else options.seconds)
    module = peers["ours"].call
    if stats(module).misses:
        raise RuntimeError(f"not every call was dispatched: {stats(module)}")
    return row_of(size, times, peers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", choices=("", *SIZES), help="a size by name")
    parser.add_argument("--peers", default=",".join(PEERS), help="of %(default)s")
    parser.add_argument("--seconds", type=float, default=30.0, help="of rounds, for each size")
    parser.add_argument("--threads", type=int, help="torch.set_num_threads")
    parser.add_argument("--device", default="cpu", help="cpu, cuda")
    parser.add_argument("--inference-mode", action="store_true", help="torch.inference_mode() instead of no_grad()")
    parser.add_argument("--quick", action="store_true", help="a tiny model, eager and ours, few rounds: does it work")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, too")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    options.peers = ["eager", "jit", "ours"] if options.quick else options.peers.split(",")
    if unknown := sorted({"ours", *options.peers} - {*PEERS}):
        parser.error(f"no peer {', '.join(unknown)}; there are {', '.join(PEERS)}")
    if "ours" not in options.peers:
        options.peers.append("ours")
    if options.threads:
        torch.set_num_threads(options.threads)
    print(f"inference, float32, by turns, on {options.device}; {versions()}; {machine()}\n")
    print(header(FORMS["inference"]))
    command = f"python -m benchmarks inference{' --device cuda' * (options.device != 'cpu')}"
    rows: list[Row] = []
    for size in SIZES:
        if options.only in ("", size):
            rows.append(measure(size, options))
            print(line(FORMS["inference"], rows[-1]), flush=True)
            if options.json:
                Results.of("inference", command, rows).save(options.json)


if __name__ == "__main__":
    main()
