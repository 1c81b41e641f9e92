"""Tensor and sequence parallel training of a Llama's block: gradients against eager's, step time of all peers.

    python -m benchmarks tensor_parallel                                        # all GPUs, NCCL
    python -m benchmarks tensor_parallel --device cpu --processes 2 --small     # gloo

``exact``: a small block in float64, a few steps of an optimizer: the largest difference of any result, gradient or
parameter from eager's, and whether the gradients' placements are eager's. ``time``: medians of forward and backward,
peers by turns, every process beginning together. A plan is ``tensor``, ``sequence``, or one of them with FSDP2 around
(``tensor+fsdp``: as many processes share the parameters as there are pairs of processes).
"""

from __future__ import annotations

import argparse
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

from benchmarks.ddp import by_turns, run_processes, say, synchronize
from bridge import add_tvm_dispatch, stats

PEERS = ("eager", "compile", "ours")
PLANS = ("tensor", "sequence", "tensor+fsdp", "sequence+fsdp")
_COLUMNS = ("q", "k", "v", "w1", "w3")


class Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.size = width // heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        projected = [each(x) for each in (self.q, self.k, self.v)]
        q, k, v = (each.view(*each.shape[:2], -1, self.size).transpose(1, 2) for each in projected)
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.w2 = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """A Llama's block without rotary embeddings."""

    def __init__(self, width: int, heads: int, inner: int):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention, self.feed = Attention(width, heads), FeedForward(width, inner)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed(self.norm2(x))


def plan_of(name: str) -> dict[str, Any]:
    """Layers of a block → how they are parallelized."""
    columns = {f"{'attention' if each in 'qkv' else 'feed'}.{each}": ColwiseParallel() for each in _COLUMNS}
    if name.startswith("tensor"):
        return columns | {"attention.o": RowwiseParallel(), "feed.w2": RowwiseParallel()}
    joined = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    return columns | {
        "attention.o": RowwiseParallel(output_layouts=Shard(1)),
        "feed.w2": RowwiseParallel(output_layouts=Shard(1)),
        "attention": PrepareModuleInput(**joined),
        "feed": PrepareModuleInput(**joined),
        "norm1": SequenceParallel(),
        "norm2": SequenceParallel(),
    }


class Peer:
    """A block under a plan, as one of the peers runs it, with its input."""

    def __init__(self, name: str, plan: str, sizes: tuple[int, int, int], rows: int, tokens: int, options: Any):
        torch.manual_seed(0)
        self.amp, self.device, self.name = options.amp, options.place, name
        self.block = Block(*sizes).to(self.device, options.dtype)
        sharded, world = plan.endswith("fsdp"), dist.get_world_size()
        shape, names = ((world // 2, 2), ("data", "tensor")) if sharded else ((world,), ("tensor",))
        mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=names)
        parallelize_module(self.block, mesh["tensor"], plan_of(plan))
        if plan.startswith("sequence"):
            tokens //= mesh["tensor"].size()
        self.x = torch.randn(rows, tokens, sizes[0], device=self.device, dtype=options.dtype, requires_grad=True)
        if name == "ours":
            with self.autocast():
                add_tvm_dispatch(self.block, self.x)
        if sharded:
            fully_shard(self.block, mesh=mesh["data"])
        if name == "compile":
            self.block.compile()

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.amp)

    def step(self) -> Tensor:
        self.x.grad = None
        self.block.zero_grad()
        with self.autocast():
            result = self.block(self.x)
        result.float().square().mean().backward() if self.amp else result.square().mean().backward()
        return result

    def told(self) -> str:
        if self.name != "ours":
            return ""
        calls = stats(self.block)
        return f"{calls.hits} hits, {calls.graphs.replays} replays, misses {dict(calls.misses)}"

    def trained(self, steps: int = 3) -> tuple[list[Tensor], list[str]]:
        """Results, gradients and parameters of some steps; the placements of the gradients."""
        optimizer, seen = torch.optim.SGD(self.block.parameters(), lr=0.1, momentum=0.9, foreach=False), []
        for _ in range(steps):
            seen += [self.step(), self.x.grad]
            seen += [_whole(each.grad) for each in self.block.parameters()]
            placed = [str(getattr(each.grad, "placements", None)) for each in self.block.parameters()]
            optimizer.step()
        seen += [_whole(each) for each in self.block.parameters()]
        return [each.detach().clone() for each in seen], placed


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def exact(plan: str, options: argparse.Namespace) -> None:
    options = argparse.Namespace(**vars(options) | {"amp": False, "dtype": torch.float64})
    peers = [Peer(name, plan, (32, 4, 48), 2, 8, options) for name in ("eager", "ours")]
    (eager, placed), (ours, as_placed) = (each.trained() for each in peers)
    off = max((a - b).abs().max().item() for a, b in zip(eager, ours, strict=True))
    say(f"{plan} float64: ours - eager {off:.1e}, placements equal: {placed == as_placed}, {peers[1].told()}")


def timed(plan: str, options: argparse.Namespace) -> None:
    sizes, shape = ((256, 8, 688), (2, 128)) if options.small else ((4096, 32, 14336), (options.rows, options.tokens))
    peers = {}
    for name in options.peers:
        started = time.perf_counter()
        peers[name] = Peer(name, plan, sizes, *shape, options)
        peers[name].step()
        synchronize(options.place)
        say(f"{plan} {name}: first step after {time.perf_counter() - started:.1f} s")
    calls = {(name, plan): (peer.step, options.place) for name, peer in peers.items()}
    medians = {name: spent for (name, _), spent in by_turns(calls, options.rounds).items()}
    for name, mine in medians.items():
        words = [f"{plan} {name:<8} {mine:8.3f} ms"]
        words += [f"/{other} {mine / medians[other]:.2f}" for other in ("eager", "compile") if other in medians]
        say(", ".join([*words, peers[name].told()]))


def work(options: argparse.Namespace) -> None:
    """The work of one process."""
    warnings.simplefilter("ignore")
    cuda = options.device == "cuda"
    options.place = torch.device("cuda", options.rank) if cuda else torch.device("cpu")
    options.amp, options.dtype = options.precision == "amp", torch.float32
    if cuda:
        torch.cuda.set_device(options.rank)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(backend, init_method=options.store, rank=options.rank, world_size=options.processes)
    for plan in options.plans:
        if "exact" in options.parts:
            exact(plan, options)
        if "time" in options.parts:
            timed(plan, options)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--processes", type=int, default=max(torch.cuda.device_count(), 2))
    parser.add_argument("--parts", nargs="+", choices=("exact", "time"), default=("exact", "time"))
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=("tensor", "sequence"))
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=PEERS)
    parser.add_argument("--precision", choices=("fp32", "amp"), default="amp")
    parser.add_argument("--rows", type=int, default=2, help="of a batch")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--small", action="store_true", help="a small block for the times, too")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        work(options)
        return
    run_processes("benchmarks.tensor_parallel", options.processes)


if __name__ == "__main__":
    main()
