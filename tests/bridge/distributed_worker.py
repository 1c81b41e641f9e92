"""Two processes, forks of one, that train under DDP or FSDP2, eager and dispatched.

    python -m tests.bridge.distributed_worker DIRECTORY

Each scenario trains two copies of a model from one seed, one of them with dispatched blocks, and reports how far they
are apart. The reports are written to ``DIRECTORY/RANK.json``, where ``test_distributed.py`` reads them.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import os
import pathlib
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from bridge import UnsupportedModule, add_tvm_dispatch, stats
from bridge.dynamo.backend import graphs
from tests.unclocked import choose_without_clock

WORLD = 2
SECONDS = 120
"""Most seconds that a collective waits for another rank."""
STEPS = 6
ROWS, WIDTH = 5, 8

Report = dict[str, Any]
Optimizer = Callable[[Any], torch.optim.Optimizer]


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=2e-3)


def sharded_adamw(parameters: Any) -> torch.optim.Optimizer:
    return ZeroRedundancyOptimizer(list(parameters), torch.optim.AdamW, lr=2e-3)


class Net(nn.Module):
    """Residual blocks; the second one can be skipped, which leaves its parameters without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList(Block(normalization) for normalization in (nn.LayerNorm, nn.BatchNorm1d))
        self.last = nn.Linear(WIDTH, 1)
        self.checkpoints = False

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        x = self.first(x)
        x = x + (checkpoint(self.blocks[0], x, use_reentrant=False) if self.checkpoints else self.blocks[0](x))
        if not skip:
            x = x + self.blocks[1](x)
        return self.last(x)


class Block(nn.Module):
    """No bias before BatchNorm: its gradient would be rounding alone, which AdamW scales to full steps."""

    def __init__(self, normalization: type[nn.Module]) -> None:
        super().__init__()
        last = nn.Linear(11, WIDTH, bias=normalization is nn.LayerNorm)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 11), nn.GELU(), nn.Dropout(0.2), last, normalization(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def make_net(dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype).train()


def dispatch_blocks(net: Net, **options: Any) -> None:
    for block in net.blocks:
        sample = torch.randn(ROWS, WIDTH, dtype=net.first.weight.dtype, requires_grad=True)
        add_tvm_dispatch(block, sample, **options)


def train(
    net: nn.Module,
    call: nn.Module,
    *,
    skip_every: int = 0,
    accumulate: Callable[[bool], Any] = contextlib.nullcontext,
    clip: bool = False,
    optimizer: Optimizer = momentum,
    steps: int = STEPS,
) -> None:
    """Optimizer steps of two micro-batches each, on data of this rank's own.

    ``accumulate(last)`` is entered around each micro-batch; ``last`` says whether an optimizer step follows.
    """
    data = torch.Generator().manual_seed(100 + dist.get_rank())
    torch.manual_seed(7 + dist.get_rank())
    dtype = next(net.parameters()).dtype
    optimizer = optimizer(net.parameters())
    for step in range(steps):
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


def ddp(
    name: str,
    *,
    whole: bool = False,
    dtype: torch.dtype = torch.float64,
    optimizer: Optimizer = momentum,
    checkpoints: bool = False,
    **options: Any,
) -> Report:
    nets = []
    for dispatched in (False, True):
        net = make_net(dtype)
        net.checkpoints = checkpoints
        if dispatched and not whole:
            dispatch_blocks(net)
        wrapped = DistributedDataParallel(net, **options)
        if dispatched and whole:  # after the wrapper is on: the order makes no difference
            dispatch_blocks(net)
        accumulate = contextlib.nullcontext
        if name == "ddp no_sync":

            def accumulate(last: bool, wrapped: DistributedDataParallel = wrapped) -> Any:
                return contextlib.nullcontext() if last else wrapped.no_sync()

        if name == "ddp hook":
            wrapped.register_comm_hook(None, fp16_compress_hook)
        if name == "ddp join":
            with wrapped.join():
                train(net, wrapped, steps=STEPS - 3 * dist.get_rank())
        else:
            skip = 3 if name == "ddp unused" else 0
            train(net, wrapped, skip_every=skip, accumulate=accumulate, optimizer=optimizer)
        nets.append(net)
    return report(*nets)


def fsdp(
    name: str,
    *,
    clip: bool = False,
    dtype: torch.dtype = torch.float64,
    optimizer: Optimizer = momentum,
    **options: Any,
) -> Report:
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
        skip = 1 if name == "fsdp mixed" else 0
        train(net, net, clip=clip, accumulate=accumulate, skip_every=skip, optimizer=optimizer)
        nets.append(net)
    return report(*nets)


def mixed_precision() -> Report:
    """Parameters in bfloat16 while a block runs: entries are compiled as the calls come."""
    nets = []
    for kind in ("exact", "eager", "dispatched"):
        net = make_net(torch.float64 if kind == "exact" else torch.float32)
        if kind == "dispatched":
            dispatch_blocks(net, on_miss="compile")
        policy = MixedPrecisionPolicy(param_dtype=None if kind == "exact" else torch.bfloat16)
        for part in (*net.blocks, net):
            fully_shard(part, mp_policy=policy)
        train(net, net, skip_every=1)
        nets.append(net)
    exact, eager, dispatched = ({name: full(p) for name, p in net.named_parameters()} for net in nets)

    def off(values: dict[str, Tensor]) -> float:
        return sum((values[name].double() - exact[name]).square().sum().item() for name in exact) ** 0.5

    return {"ours": off(dispatched), "eager": off(eager), "hits": stats(nets[2].blocks[0]).hits}


def saved_and_loaded() -> Report:
    """Shards of a dispatched model, saved and loaded by ``torch.distributed.checkpoint``, go on as eager's do."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    nets = []
    for dispatched in (False, True):
        first, second = make_net(), make_net()
        for net in (first, second):
            if dispatched:
                dispatch_blocks(net)
            for part in (*net.blocks, net):
                fully_shard(part)
        train(first, first, steps=3)
        dcp.save(get_model_state_dict(first), checkpoint_id=f"{folder[0]}/{dispatched}")
        loaded = get_model_state_dict(second)
        dcp.load(loaded, checkpoint_id=f"{folder[0]}/{dispatched}")
        set_model_state_dict(second, loaded)
        train(second, second)
        nets.append(second)
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


def refusals() -> Report:
    """Refusals: a dispatch that is added too late, or to a wrapper."""
    sharded = make_net()
    for part in (*sharded.blocks, sharded):
        fully_shard(part)
    flat = FullyShardedDataParallel(make_net(), device_id=torch.device("cpu"))
    modules = {"sharded": sharded, "flat": flat, "wrapped": DistributedDataParallel(make_net())}
    found = {}
    for name, module in modules.items():
        try:
            add_tvm_dispatch(module, torch.randn(ROWS, 6, dtype=torch.float64))
        except UnsupportedModule as refusal:
            found[name] = str(refusal)
    return found


SCENARIOS: dict[str, Callable[[], Report]] = {
    "ddp": lambda: ddp("ddp", bucket_cap_mb=0.0005),  # several buckets, although the model is small
    "ddp no_sync": lambda: ddp("ddp no_sync"),
    "ddp unused": lambda: ddp("ddp unused", find_unused_parameters=True),
    "ddp static_graph": lambda: ddp("ddp static_graph", static_graph=True),
    "ddp bucket_view": lambda: ddp("ddp bucket_view", gradient_as_bucket_view=True),
    "ddp dispatched last": lambda: ddp("ddp dispatched last", whole=True),
    "ddp join": lambda: ddp("ddp join"),
    "ddp hook": lambda: ddp("ddp hook"),
    "ddp checkpoint": lambda: ddp("ddp checkpoint", checkpoints=True),
    "ddp sharded optimizer": lambda: ddp("ddp sharded optimizer", optimizer=sharded_adamw),
    "ddp float32": lambda: ddp("ddp float32", dtype=torch.float32),
    "ddp float32 adamw": lambda: ddp("ddp float32 adamw", dtype=torch.float32, optimizer=adamw),
    "fsdp": lambda: fsdp("fsdp"),
    "fsdp not resharded": lambda: fsdp("fsdp not resharded", reshard_after_forward=False),
    "fsdp accumulate": lambda: fsdp("fsdp accumulate"),
    "fsdp clip": lambda: fsdp("fsdp clip", clip=True),
    "fsdp mixed": lambda: fsdp(
        "fsdp mixed", dtype=torch.float32, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    ),
    "fsdp mixed compiled": mixed_precision,
    "fsdp float32 adamw": lambda: fsdp("fsdp float32 adamw", dtype=torch.float32, optimizer=adamw),
    "fsdp saved": saved_and_loaded,
    "refusals": refusals,
    "fsdp flat": flat_shards,
    "ddp compiled": lambda: compiled(sharded=False),
    "fsdp compiled": lambda: compiled(sharded=True),
}


def start(folder: pathlib.Path, size: int, work: Callable[[], Any]) -> list[int]:
    """Forks the ranks of a group, each of which runs ``work`` → their process numbers.

    There is one thread meanwhile: the ranks share the imports and compiled code of the process.
    """
    ranks: list[int] = []
    for rank in range(size):
        ranks.append(os.fork())
        if ranks[-1]:
            continue
        status = 1
        try:
            torch.set_num_threads(1)
            options = {"rank": rank, "world_size": size, "timeout": datetime.timedelta(seconds=SECONDS)}
            dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", **options)
            work()
            status = 0
        except BaseException:  # noqa: BLE001 - a rank ends here
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            # gloo's threads now and then abort a process that ends in the ordinary way ("terminate called without …")
            os._exit(status)
    return ranks


def end(ranks: list[int]) -> bool:
    """Waits for the ranks → whether one of them failed."""
    return any([os.waitpid(rank, 0)[1] for rank in ranks])


def report_all(folder: pathlib.Path, scenarios: dict[str, Callable[[], Report]]) -> None:
    """Writes the reports of a rank."""
    reports = {name: scenario() for name, scenario in scenarios.items()}
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(reports))
    dist.barrier()


def main(directory: str, *chosen: str) -> None:
    from tests.bridge.distributed_whole import WHOLE, dispatch_whole  # it imports this module

    torch.set_num_threads(1)
    choose_without_clock()
    held = [make_net(dtype) for dtype in (torch.float64, torch.float32)]
    for net in held:  # alive to the end: the scenarios' blocks are equal, and are captured and compiled once
        dispatch_blocks(net)
    held.append(dispatch_whole(make_net()))
    folder, scenarios = pathlib.Path(directory), SCENARIOS | WHOLE
    work = functools.partial(report_all, folder, {name: scenarios[name] for name in chosen or scenarios})
    sys.exit(end(start(folder, WORLD, work)))


if __name__ == "__main__":
    main(*sys.argv[1:])
