"""Data parallel training: parameters against eager's, step time, scaling, communication under computation.

    python -m benchmarks ddp                                       # BERT-base over all GPUs, NCCL
    python -m benchmarks ddp --parts exact --wrap ddp fsdp
    python -m benchmarks ddp --device cpu --quick --processes 2    # gloo

``exact``: a small model, ten steps from one seed, every peer beside eager in the same wrapper: in float64 the largest
difference of any parameter; in bfloat16 (autocast) the distance from float64's parameters, ours and eager's, and that
of two eager runs. ``time``: medians of a whole step (forward, backward, fused AdamW), peers by turns, batches of one
size in every process; ``alone`` is the same module without a wrapper, so that ``efficiency`` is alone / wrapped.
``trace``: how long NCCL's kernels run in a step, and for how much of that other kernels run too.

Peers: ``whole`` is one dispatched module, ``one node`` the same with a backward that hands out all gradients at its
end, ``layers`` has each layer dispatched by itself.
"""

from __future__ import annotations

import argparse
import copy
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from transformers import BertConfig, BertForMaskedLM

from bridge import add_tvm_dispatch, stats
from bridge.dispatch import backward_nodes

SMALL = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 512}
PEERS = ("eager", "compile", "whole", "one node", "layers")
WARM_UP, TRACED = 8, 3


def make_model(device: torch.device, small: bool, dtype: torch.dtype = torch.float32) -> BertForMaskedLM:
    torch.manual_seed(0)
    # without a trace, transformers leaves masks of ones out, for which fused attention draws another dropout
    config = BertConfig(attn_implementation="eager", **(SMALL | {"vocab_size": 1000} if small else {}))
    return BertForMaskedLM(config).to(device, dtype).train()


def batch_of(model: BertForMaskedLM, rows: int, length: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    ids = torch.randint(model.config.vocab_size, (rows, length), generator=generator)
    ids = ids.to(next(model.parameters()).device)
    return {"input_ids": ids, "labels": ids}


def dispatch(model: BertForMaskedLM, peer: str, batch: dict[str, Tensor], amp: bool) -> list[nn.Module]:
    """In place, as ``peer`` says, under the autocast of the steps; returns the modules that are dispatched."""
    with torch.autocast(batch["input_ids"].device.type, torch.bfloat16, enabled=amp):
        if peer in ("whole", "one node"):
            most, backward_nodes.MOST_NODES = backward_nodes.MOST_NODES, 1 if peer == "one node" else 16
            try:
                add_tvm_dispatch(model, sample_kwargs=batch)
            finally:
                backward_nodes.MOST_NODES = most
            return [model]
        if peer == "layers":
            samples = samples_of(model.bert.encoder.layer, lambda: model(**batch))
            for layer, (args, kwargs) in samples.items():
                add_tvm_dispatch(layer, args, sample_kwargs=kwargs)
            return list(samples)
    return []


def samples_of(layers: Any, call: Callable[[], Any]) -> dict[nn.Module, tuple[tuple, dict[str, Any]]]:
    """The arguments that each layer is called with."""
    found: dict[nn.Module, tuple[tuple, dict[str, Any]]] = {}

    def note(layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        hidden, *others = args
        found[layer] = (hidden.detach().requires_grad_(), *others), kwargs

    hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    call()
    for hook in hooks:
        hook.remove()
    return found


def wrapped(model: BertForMaskedLM, wrap: str, peer: str) -> nn.Module:
    if wrap == "fsdp":
        for part in () if peer in ("whole", "one node") else model.bert.encoder.layer:
            fully_shard(part)
        return fully_shard(model)
    if wrap == "ddp":
        on = None if next(model.parameters()).device.type == "cpu" else [torch.cuda.current_device()]
        return DistributedDataParallel(model, device_ids=on, gradient_as_bucket_view=True)
    return model


class Peer:
    """A model in its wrapper, with its optimizer."""

    def __init__(self, name: str, wrap: str, options: argparse.Namespace, **made: Any):
        self.device, self.amp = options.place, options.precision == "amp"
        self.model = make_model(self.device, **made)
        rows, length = (4, 32) if made["small"] else (options.rows, options.length)
        self.batch = batch_of(self.model, rows, length, 0)
        self.next_batch = lambda seed: batch_of(self.model, rows, length, seed)
        self.dispatched = dispatch(self.model, name, self.batch, self.amp)
        self.call = wrapped(self.model, wrap, name)
        if name == "compile":
            self.call = torch.compile(self.call)
        fused = {"fused": True} if self.device.type == "cuda" else {}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, **fused)

    def step(self, batch: dict[str, Tensor] | None = None) -> None:
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.amp):
            loss = self.call(**(batch or self.batch)).loss
        loss.backward()
        self.optimizer.step()

    def trained(self, steps: int = 10) -> dict[str, Tensor]:
        """Parameters after that many steps, each with a batch of its own."""
        for seed in range(steps):
            torch.manual_seed(100 * seed + dist.get_rank())
            self.step(self.next_batch(seed))
        named = self.model.named_parameters()
        return {name: getattr(each, "full_tensor", lambda each=each: each)().detach().double() for name, each in named}

    def told(self) -> str:
        """Autograd nodes, hits and misses, where something is dispatched."""
        if not self.dispatched:
            return ""
        found = [stats(each) for each in self.dispatched]
        nodes = sum(len(entry.programs.nodes) for each in found for entry in each.entries)
        misses = sum((each.misses for each in found), start=Counter())
        return f"{nodes} nodes, {sum(each.hits for each in found)} hits, misses {dict(misses)}"


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def distance(ours: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max((ours[name] - other[name]).abs().max().item() for name in other)


def exact(wrap: str, options: argparse.Namespace) -> None:
    options = copy.copy(options)
    for options.precision in ("float64", "amp"):
        dtype = torch.float64 if options.precision == "float64" else torch.float32

        def trained(name: str, dtype: torch.dtype = dtype, options: argparse.Namespace = options) -> dict[str, Tensor]:
            made = Peer(name, wrap, options, small=True, dtype=dtype)
            found = made.trained()
            if name != "eager":
                say(f"{wrap} {options.precision} {name}: {made.told()}")
            return found

        small_nodes, backward_nodes.LEAST_BYTES = backward_nodes.LEAST_BYTES, 1 << 16
        found = {name: trained(name) for name in ("eager", "whole", "layers")}
        backward_nodes.LEAST_BYTES = small_nodes
        off = {name: distance(found[name], found["eager"]) for name in ("whole", "layers")}
        line = ", ".join(f"{name} - eager {value:.1e}" for name, value in off.items())
        if options.precision == "float64":
            truth = found["eager"]
        else:
            line += f", eager - eager {distance(trained('eager'), found['eager']):.1e}"
            line += "; from float64: " + ", ".join(f"{name} {distance(found[name], truth):.1e}" for name in found)
        say(f"{wrap} {options.precision}, 10 steps: {line}")


def timed(wrap: str, options: argparse.Namespace) -> None:
    runs = {}
    for name in options.peers:
        for kind in (wrap, "alone"):
            if kind == wrap or name in ("eager", "compile", "whole"):
                runs[name, kind] = Peer(name, kind, options, small=options.quick)
    spent: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
    for turn in range(options.rounds + WARM_UP):
        for key, peer in runs.items():
            synchronize(peer.device)
            dist.barrier()
            started = time.perf_counter()
            peer.step()
            synchronize(peer.device)
            if turn >= WARM_UP:
                spent[key].append(1e3 * (time.perf_counter() - started))
    medians = {key: statistics.median(values) for key, values in spent.items()}
    for name in options.peers:
        one = medians.get((name, "alone"))
        scaling = f", alone {one:.2f} ms, efficiency {one / medians[name, wrap]:.3f}" if one else ""
        others = [other for other in ("eager", "compile") if other in options.peers]
        beside = [f"/{other} {medians[name, wrap] / medians[other, wrap]:.2f}" for other in others]
        told = runs[name, wrap].told()
        say(f"{wrap} {name:<9} {medians[name, wrap]:8.2f} ms {' '.join(beside)}{scaling}  {told}")
    if "trace" in options.parts and options.place.type == "cuda":
        for name in options.peers:
            trace(f"{wrap} {name}", runs[name, wrap])


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def trace(title: str, peer: Peer) -> None:
    """Says how much of NCCL's time lies under other kernels, per step."""
    dist.barrier()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        for _ in range(TRACED):
            peer.step()
        torch.cuda.synchronize()
    sent, computed = [], []
    for event in found.events():
        if event.device_type is torch.autograd.DeviceType.CUDA and not getattr(event, "is_user_annotation", False):
            kind = sent if "nccl" in event.name.lower() else computed
            kind.append((event.time_range.start, event.time_range.end))
    both = overlap(merged(sent), merged(computed))
    total = sum(end - begin for begin, end in merged(sent))
    share = both / total if total else 0.0
    say(
        f"{title:<14} NCCL {total / TRACED / 1e3:.2f} ms in {len(sent) / TRACED:.0f} kernels a step,"
        f" {both / TRACED / 1e3:.2f} ms of it under {len(computed) / TRACED:.0f} others ({share:.0%})"
    )


def merged(ranges: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same times as ranges that lie apart."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(ranges):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def overlap(one: list[tuple[float, float]], other: list[tuple[float, float]]) -> float:
    """The time that lies in both."""
    total, place = 0.0, 0
    for begin, end in one:
        while place < len(other) and other[place][1] <= begin:
            place += 1
        for start, stop in other[place:]:
            if start >= end:
                break
            total += max(0.0, min(end, stop) - max(begin, start))
    return total


def work(options: argparse.Namespace) -> None:
    """One of the processes."""
    warnings.simplefilter("ignore")
    cuda = options.device == "cuda"
    options.place = torch.device("cuda", options.rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(options.rank)
        torch.backends.cuda.matmul.allow_tf32 = options.precision == "tf32"
    backend = "nccl" if cuda else "gloo"
    dist.init_process_group(backend, init_method=options.store, rank=options.rank, world_size=options.processes)
    for wrap in options.wrap:
        if "exact" in options.parts:
            exact(wrap, options)
        if "time" in options.parts:
            timed(wrap, options)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--processes", type=int, default=max(torch.cuda.device_count(), 2))
    parser.add_argument("--parts", nargs="+", choices=("exact", "time", "trace"), default=("exact", "time", "trace"))
    parser.add_argument("--wrap", nargs="+", choices=("ddp", "fsdp"), default=("ddp",))
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=PEERS)
    parser.add_argument("--precision", choices=("fp32", "tf32", "amp"), default="amp")
    parser.add_argument("--rows", type=int, default=16, help="of a batch, in each process")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="a small model for the times, too")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        work(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.ddp", *sys.argv[1:], "--store", (Path(folder) / "store").as_uri()]
        ranks = range(options.processes)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the processes end, too
        workers = [subprocess.Popen([*command, "--processes", str(len(ranks)), "--rank", str(rank)]) for rank in ranks]
        try:
            while any(worker.poll() is None for worker in workers) and not any(worker.poll() for worker in workers):
                time.sleep(0.2)
        finally:  # one that failed leaves the others waiting
            codes = [worker.poll() for worker in workers]
            for worker in workers:
                worker.kill()
                worker.wait()
    sys.exit(max(abs(code or 0) for code in codes))


if __name__ == "__main__":
    main()
