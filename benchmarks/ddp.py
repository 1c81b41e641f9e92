"""Data parallel training: parameters against eager's, step time, scaling, communication under computation.

    python -m benchmarks ddp                                       # BERT-base over all GPUs, NCCL
    python -m benchmarks ddp --parts exact --wrap ddp fsdp
    python -m benchmarks ddp --device cpu --quick --processes 2    # gloo

``exact``: a small model, ten steps from one seed, each peer beside eager in the same wrapper. In float64: the largest
difference of any parameter. In bfloat16 (autocast): the distances of ours and eager's from the float64 parameters, and
the distance between two eager runs. ``time``: medians of a whole step (forward, backward, fused AdamW), peers by turns,
batches of one size in every process. ``alone`` is the same module without a wrapper, and the number behind it, alone /
wrapped, the scaling efficiency; ``without all-reduce`` is the same step under DDP's ``no_sync``. ``trace``: the time of
NCCL's kernels in a step, its overlap with other kernels, and a picture of the last step.

Peers: ``whole`` is one dispatched module; ``launched`` the same without CUDA graphs; ``one node`` the same with a
backward that returns all gradients at its end; ``layers`` dispatches each layer by itself. ``compile`` is
``torch.compile`` of DDP's module, or of each layer that FSDP2 shards.
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
from transformers import BertConfig, BertForMaskedLM

from benchmarks.communication import told, traced
from bridge import add_tvm_dispatch, stats
from bridge.dispatch import backward_nodes

SMALL = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 512}
PEERS = ("eager", "compile", "whole", "launched", "one node", "layers")
WHOLE = ("whole", "launched", "one node")
WARM_UP = 20
"""Steps in which CUDA graphs are recorded: FSDP's parameters move at first."""


def make_model(
    device: torch.device, small: bool, dtype: torch.dtype = torch.float32, layers: int = 12
) -> BertForMaskedLM:
    torch.manual_seed(0)
    # without a trace, transformers leaves masks of ones out, for which fused attention draws another dropout
    depth = {"num_hidden_layers": layers}
    config = BertConfig(attn_implementation="eager", **(SMALL | {"vocab_size": 1000} if small else depth))
    return BertForMaskedLM(config).to(device, dtype).train()


def batch_of(model: BertForMaskedLM, rows: int, length: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    ids = torch.randint(model.config.vocab_size, (rows, length), generator=generator)
    ids = ids.to(next(model.parameters()).device)
    return {"input_ids": ids, "labels": ids}


def dispatch(model: BertForMaskedLM, peer: str, batch: dict[str, Tensor], amp: bool) -> list[nn.Module]:
    """Dispatches a peer's modules in place, under the autocast of the steps; returns the dispatched modules."""
    with torch.autocast(batch["input_ids"].device.type, torch.bfloat16, enabled=amp):
        if peer in WHOLE:
            most, backward_nodes.MOST_NODES = backward_nodes.MOST_NODES, 1 if peer == "one node" else 16
            try:
                add_tvm_dispatch(model, sample_kwargs=batch, cuda_graphs=False if peer == "launched" else "auto")
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
    """The arguments of each layer's call."""
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
        for part in () if peer in WHOLE else model.bert.encoder.layer:
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
        self.model = make_model(self.device, layers=options.layers, **made)
        rows, length = (4, 32) if made["small"] else (options.rows, options.length)
        self.batch = batch_of(self.model, rows, length, 0)
        self.next_batch = lambda seed: batch_of(self.model, rows, length, seed)
        self.dispatched = dispatch(self.model, name, self.batch, self.amp)
        if name == "compile" and wrap == "fsdp":  # layer by layer, as FSDP2 is compiled; all share one graph
            for layer in self.model.bert.encoder.layer:
                layer.compile()
        self.call = wrapped(self.model, wrap, name)
        if name == "compile" and wrap != "fsdp":
            self.call = torch.compile(self.call)
        fused = {"fused": True} if self.device.type == "cuda" else {}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, **fused)

    def step(self, batch: dict[str, Tensor] | None = None) -> None:
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.amp):
            loss = self.call(**(batch or self.batch)).loss
        loss.backward()
        self.optimizer.step()

    def step_without_sync(self) -> None:
        with self.call.no_sync():
            self.step()

    def trained(self, steps: int = 10) -> dict[str, Tensor]:
        """Parameters after this number of steps, each with a batch of its own."""
        for seed in range(steps):
            torch.manual_seed(100 * seed + dist.get_rank())
            self.step(self.next_batch(seed))
        named = self.model.named_parameters()
        return {name: getattr(each, "full_tensor", lambda each=each: each)().detach().double() for name, each in named}

    def told(self) -> str:
        """Autograd nodes, hits and misses of the dispatched modules."""
        if not self.dispatched:
            return ""
        found = [stats(each) for each in self.dispatched]
        nodes = sum(len(entry.programs.nodes) for each in found for entry in each.entries)
        misses = sum((each.misses for each in found), start=Counter())
        replays = sum(each.graphs.replays for each in found)
        return f"{nodes} nodes, {sum(each.hits for each in found)} hits, {replays} replays, misses {dict(misses)}"


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
    runs: dict[tuple[str, str], Peer] = {}
    for name in options.peers:
        for kind in (wrap, "alone"):
            if kind == wrap or name in options.alone:
                started = time.perf_counter()
                runs[name, kind] = peer = Peer(name, kind, options, small=options.quick)
                peer.step()
                synchronize(peer.device)
                say(f"{name} ({kind}): first step after {time.perf_counter() - started:.1f} s")
    calls = {key: (peer.step, peer.device) for key, peer in runs.items()}
    if wrap == "ddp":  # torch.compile would compile it once more
        unsent = [name for name in options.peers if name != "compile"]
        calls |= {(name, "no_sync"): (runs[name, wrap].step_without_sync, options.place) for name in unsent}
    medians = by_turns(calls, options.rounds)
    for name in options.peers:
        mine = medians[name, wrap]
        words = [f"{wrap} {name:<9} {mine:8.2f} ms"]
        words += [
            f"/{other} {mine / medians[other, wrap]:.2f}" for other in ("eager", "compile") if other in options.peers
        ]
        for kind, word in (("no_sync", "without all-reduce"), ("alone", "alone")):
            if (name, kind) in medians:
                words.append(f"{word} {medians[name, kind]:.2f} ({medians[name, kind] / mine:.3f})")
        say(", ".join([*words, runs[name, wrap].told()]))
    if "trace" in options.parts and options.place.type == "cuda":
        on_host = dist.new_group(backend="gloo")
        for name in options.peers:
            lanes = traced(runs[name, wrap].step, lambda: dist.barrier(on_host))
            say(f"{wrap} {name}: {told(lanes)}" + "".join(f"\n{each.picture()}" for each in lanes[-1:]))


def by_turns(calls: dict[tuple[str, str], tuple[Callable[[], None], torch.device]], rounds: int) -> dict[tuple, float]:
    """Medians in milliseconds; all processes begin each call together."""
    spent: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    for turn in range(rounds + WARM_UP):
        for key, (call, device) in calls.items():
            synchronize(device)
            dist.barrier()
            started = time.perf_counter()
            call()
            synchronize(device)
            if turn >= WARM_UP:
                spent[key].append(1e3 * (time.perf_counter() - started))
    return {key: statistics.median(values) for key, values in spent.items()}


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def work(options: argparse.Namespace) -> None:
    """The work of one process."""
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


def run_processes(script: str, count: int) -> None:
    """Runs a script with this one's options in each of ``count`` processes (``--rank``, ``--store``), and ends."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", script, *sys.argv[1:], "--store", (Path(folder) / "store").as_uri()]
        command += ["--processes", str(count)]
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the processes end as well
        workers = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(count)]
        try:
            while any(worker.poll() is None for worker in workers) and not any(worker.poll() for worker in workers):
                time.sleep(0.2)
        finally:  # a failed process leaves the others waiting
            codes = [worker.poll() for worker in workers]
            for worker in workers:
                worker.kill()
                worker.wait()
    sys.exit(max(abs(code or 0) for code in codes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--processes", type=int, default=max(torch.cuda.device_count(), 2))
    parser.add_argument("--parts", nargs="+", choices=("exact", "time", "trace"), default=("exact", "time", "trace"))
    parser.add_argument("--wrap", nargs="+", choices=("ddp", "fsdp"), default=("ddp",))
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=[name for name in PEERS if name != "launched"])
    alone = "peers that are timed without a wrapper, too"
    parser.add_argument("--alone", nargs="*", choices=PEERS, default=("eager", "compile", "whole"), help=alone)
    parser.add_argument("--precision", choices=("fp32", "tf32", "amp"), default="amp")
    parser.add_argument("--rows", type=int, default=16, help="of a batch, in each process")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="a small model for the times, too")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        work(options)
        return
    run_processes("benchmarks.ddp", options.processes)


if __name__ == "__main__":
    main()
