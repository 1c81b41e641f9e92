"""One of two processes that train under DDP or FSDP2, eager and dispatched; run by ``test_distributed.py``.

    RANK=0 python -m tests.bridge.distributed_worker DIRECTORY

Each scenario trains two copies of a model from one seed, one of them with dispatched blocks, and reports how far they
are apart. The reports are written to ``DIRECTORY/RANK.json``.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from bridge import UnsupportedModule, add_tvm_dispatch, stats
from bridge.dynamo import graphs

WORLD = 2
STEPS = 10
ROWS, WIDTH = 5, 8

Report = dict[str, Any]


class Net(nn.Module):
    """Residual blocks; the second one can be skipped, which leaves its parameters without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList(Block(normalization) for normalization in (nn.LayerNorm, nn.BatchNorm1d))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        x = self.first(x)
        x = x + self.blocks[0](x)
        if not skip:
            x = x + self.blocks[1](x)
        return self.last(x)


class Block(nn.Module):
    def __init__(self, normalization: type[nn.Module]) -> None:
        super().__init__()
        layers = nn.Linear(WIDTH, 11), nn.GELU(), nn.Dropout(0.2), nn.Linear(11, WIDTH), normalization(WIDTH)
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def make_net(dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype).train()


def dispatch_blocks(net: Net) -> None:
    for block in net.blocks:
        add_tvm_dispatch(block, torch.randn(ROWS, WIDTH, dtype=net.first.weight.dtype, requires_grad=True))


def train(
    net: nn.Module,
    call: nn.Module,
    *,
    skip_every: int = 0,
    accumulate: Callable[[bool], Any] = contextlib.nullcontext,
    clip: bool = False,
) -> None:
    """``STEPS`` optimizer steps of two micro-batches each, on data of this rank's own.

    ``accumulate(last)`` is entered around each micro-batch; ``last`` says whether an optimizer step follows.
    """
    data = torch.Generator().manual_seed(100 + dist.get_rank())
    torch.manual_seed(7 + dist.get_rank())
    dtype = next(net.parameters()).dtype
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        for last in (False, True):
            x = torch.randn(ROWS, 6, generator=data, dtype=torch.float64).to(dtype)
            with accumulate(last):
                call(x, skip=bool(skip_every) and step % skip_every == 0).square().mean().backward()
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def distance(eager: Net, dispatched: Net) -> Report:
    mine, other = (dict([*net.named_parameters(), *net.named_buffers()]) for net in (dispatched, eager))
    start = make_net(next(eager.parameters()).dtype).state_dict()
    return {
        "difference": max((full(mine[name]) - full(other[name])).abs().max().item() for name in other),
        "moved": max((full(value) - start[name]).abs().max().item() for name, value in eager.named_parameters()),
    }


def report(eager: Net, dispatched: Net) -> Report:
    return distance(eager, dispatched) | {
        "hits": [stats(block).hits for block in dispatched.blocks],
        "misses": [dict(stats(block).misses) for block in dispatched.blocks],
    }


def ddp(name: str, *, whole: bool = False, **options: Any) -> Report:
    nets = []
    for dispatched in (False, True):
        net = make_net()
        if dispatched and not whole:
            dispatch_blocks(net)
        wrapped = DistributedDataParallel(net, **options)
        if dispatched and whole:  # after the wrapper is on: the order makes no difference
            dispatch_blocks(net)
        accumulate = contextlib.nullcontext
        if name == "ddp no_sync":

            def accumulate(last: bool, wrapped: DistributedDataParallel = wrapped) -> Any:
                return contextlib.nullcontext() if last else wrapped.no_sync()

        train(net, wrapped, skip_every=3 if name == "ddp unused" else 0, accumulate=accumulate)
        nets.append(net)
    return report(*nets)


def fsdp(name: str, *, clip: bool = False, dtype: torch.dtype = torch.float64, **options: Any) -> Report:
    nets = []
    for dispatched in (False, True):
        net = make_net(dtype)
        if dispatched:
            dispatch_blocks(net)
        for part in (*net.blocks, net):
            fully_shard(part, **options)
        accumulate = contextlib.nullcontext
        if name == "fsdp accumulate":

            @contextlib.contextmanager
            def accumulate(last: bool, net: Any = net) -> Any:
                net.set_requires_gradient_sync(last)
                yield

        # batch normalization cannot run on halves beside its buffers in full precision, so that block is skipped
        train(net, net, clip=clip, accumulate=accumulate, skip_every=1 if name == "fsdp mixed" else 0)
        nets.append(net)
    return report(*nets)


def compiled(*, sharded: bool) -> Report:
    """The whole wrapped model, or each sharded block, through ``torch.compile(backend="tvm_dispatch")``."""
    torch.compiler.reset()
    nets = []
    for backend in ("eager", "tvm_dispatch"):
        net = make_net()
        if sharded:
            for block in net.blocks:
                block.compile(backend=backend)
            for part in (*net.blocks, net):
                fully_shard(part)
        call = net if sharded else torch.compile(DistributedDataParallel(net), backend=backend)
        train(net, call)
        nets.append(net)
    return distance(*nets) | {
        "hits": sum(graph.stats.hits for graph in graphs()),
        "misses": [str(graph.stats.misses) for graph in graphs() if graph.stats.misses],
    }


def flat_shards() -> Report:
    """``FullyShardedDataParallel`` (FSDP1) around each block: parameters become views of one flat tensor."""
    nets = []
    for dispatched in (False, True):
        net = make_net()
        if dispatched:
            dispatch_blocks(net)
        blocks = list(net.blocks)
        for index, inner in enumerate(blocks):
            net.blocks[index] = FullyShardedDataParallel(inner, use_orig_params=True, device_id=torch.device("cpu"))
        train(net, net)
        nets.append((net, blocks))
    values = []
    for net, _ in nets:
        with FullyShardedDataParallel.summon_full_params(net):
            values.append([parameter.detach().clone() for parameter in net.parameters()])
    counted = [stats(inner) for inner in nets[1][1]]
    return {
        "difference": max((a - b).abs().max().item() for a, b in zip(*values, strict=True)),
        "hits": [each.hits for each in counted],
        "misses": [sum(each.misses.values()) for each in counted],
    }


def fsdp_first() -> Report:
    """Dispatch asked for when the parameters are shards already."""
    net = make_net()
    for part in (*net.blocks, net):
        fully_shard(part)
    try:
        dispatch_blocks(net)
    except UnsupportedModule as refusal:
        return {"refusal": str(refusal)}
    return {"refusal": None}


SCENARIOS: dict[str, Callable[[], Report]] = {
    "ddp": lambda: ddp("ddp", bucket_cap_mb=0.0005),  # several buckets, although the model is small
    "ddp no_sync": lambda: ddp("ddp no_sync"),
    "ddp unused": lambda: ddp("ddp unused", find_unused_parameters=True),
    "ddp static_graph": lambda: ddp("ddp static_graph", static_graph=True),
    "ddp bucket_view": lambda: ddp("ddp bucket_view", gradient_as_bucket_view=True),
    "ddp dispatched last": lambda: ddp("ddp dispatched last", whole=True),
    "fsdp": lambda: fsdp("fsdp"),
    "fsdp not resharded": lambda: fsdp("fsdp not resharded", reshard_after_forward=False),
    "fsdp accumulate": lambda: fsdp("fsdp accumulate"),
    "fsdp clip": lambda: fsdp("fsdp clip", clip=True),
    "fsdp mixed": lambda: fsdp(
        "fsdp mixed", dtype=torch.float32, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    ),
    "fsdp first": fsdp_first,
    "fsdp flat": flat_shards,
    "ddp compiled": lambda: compiled(sharded=False),
    "fsdp compiled": lambda: compiled(sharded=True),
}


def main(directory: str) -> None:
    folder = pathlib.Path(directory)
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=WORLD)
    reports = {name: scenario() for name, scenario in SCENARIOS.items()}
    (folder / f"{rank}.json").write_text(json.dumps(reports))
    dist.barrier()
    sys.stdout.flush()
    # gloo's threads now and then abort a process that ends in the ordinary way ("terminate called without …")
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
