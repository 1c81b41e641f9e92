"""Tensor and sequence parallel layers, dispatched as one module: groups of processes, forks of one.

    python -m tests.bridge.distributed_layers DIRECTORY

Reports of :data:`LAYERS` and of :func:`sharded` are written to ``DIRECTORY/GROUP/RANK.json``. In two groups the second
process is gone (it raises instead of a call, or is killed); the first one's error is in ``DIRECTORY/GROUP/error.json``.
"""

from __future__ import annotations

import datetime
import functools
import json
import os
import pathlib
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

from bridge import UnsupportedModule, add_tvm_dispatch, save_compiled, stats
from tests.bridge.distributed_worker import Report, end, full, report_all, start
from tests.unclocked import choose_without_clock

WIDTH, HEADS, TOKENS, ROWS, STEPS = 8, 4, 4, 2, 3

Plan = dict[str, Any]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        heads = [each(x) for each in (self.q, self.k, self.v)]
        q, k, v = (each.view(*each.shape[:2], -1, WIDTH // HEADS).transpose(1, 2) for each in heads)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, 12, bias=False), nn.Linear(WIDTH, 12)
        self.w2 = nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """A block of a Llama; the feed-forward layer has biases."""

    def __init__(self, normalization: type[nn.Module] = nn.RMSNorm) -> None:
        super().__init__()
        self.n1, self.n2 = normalization(WIDTH), normalization(WIDTH)
        self.attention, self.feed = Attention(), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.n1(x))
        return x + self.feed(self.n2(x))


def tensor_plan() -> Plan:
    columns = ("attention.q", "attention.k", "attention.v", "feed.w1", "feed.w3")
    return {
        **{name: ColwiseParallel() for name in columns},
        "attention.o": RowwiseParallel(),
        "feed.w2": RowwiseParallel(),
    }


def sequence_plan() -> Plan:
    """Activations between layers are split along the sequence, as torchtitan's plan of a Llama does."""
    rows = {name: RowwiseParallel(output_layouts=Shard(1)) for name in ("attention.o", "feed.w2")}
    joined = {
        name: PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        for name in ("attention", "feed")
    }
    return {**tensor_plan(), **rows, **joined, "n1": SequenceParallel(), "n2": SequenceParallel()}


def stack(*plans: Any) -> tuple[Callable[[], nn.Module], Callable[[], Plan]]:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.Tanh())

    return make, lambda: {str(2 * place): plan for place, plan in enumerate(plans)}


#: A module, and the plan that it gets before it is dispatched.
PLANS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Plan]]] = {
    "tensor": (Block, tensor_plan),
    "tensor layer norm": (lambda: Block(nn.LayerNorm), tensor_plan),
    "sequence": (Block, sequence_plan),
    "sequence layer norm": (lambda: Block(nn.LayerNorm), sequence_plan),
    "columns of a sequence": stack(ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())),
    "columns to a sequence": stack(ColwiseParallel(output_layouts=Shard(1)), RowwiseParallel(input_layouts=Shard(1))),
    "rows of all": stack(RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0))),
}


def sample() -> Tensor:
    torch.manual_seed(5)
    return torch.randn(ROWS, TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().double()


def trained(module: nn.Module, x: Tensor, change: Callable[[int], Any] = lambda step: None) -> tuple[list[Tensor], ...]:
    """The results, and the gradients and parameters (whole), of some steps of an optimizer."""
    optimizer, results, seen = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9), [], []
    for step in range(STEPS):
        change(step)
        results.append(module(x))
        results[-1].square().mean().backward()
        seen += [full(each.grad).clone() for each in module.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        results.append(module(x))
    return [each.detach() for each in results], [*seen, x.grad, *(full(each).clone() for each in module.parameters())]


def placements(module: nn.Module, x: Tensor) -> list[str]:
    module(x).square().mean().backward()
    return [str(getattr(each.grad, "placements", None)) for each in module.parameters()]


def compared(
    make: Any, plan: Any, change: Any = lambda module, step: None, mesh: Any = None, shard: Any = None
) -> Report:
    """Distance from eager after some steps, and statistics."""
    seen, placed, mesh = [], [], init_device_mesh("cpu", (dist.get_world_size(),)) if mesh is None else mesh
    for dispatched in (False, True):
        module, x = made(make), sample()
        parallelize_module(module, mesh, plan())
        if dispatched:
            add_tvm_dispatch(module, x)
            with torch.no_grad():
                add_tvm_dispatch(module, x)
        if shard is not None:
            fully_shard(module, mesh=shard)
        seen.append(trained(module, x, lambda step, module=module: change(module, step)))
        placed.append(placements(module, x))
    calls, (results, _) = stats(module), seen[0]
    return {
        "difference": max(
            (a - b).abs().max().item() for pair in zip(*seen, strict=True) for a, b in zip(*pair, strict=True)
        ),
        "moved": (results[0] - results[-1]).abs().max().item(),
        "placements": placed,
        "hits": calls.hits,
        "misses": dict(calls.misses),
    }


def sharded() -> Report:
    """FSDP2 around: its mesh has as many ranks as there are pairs of processes."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor"))
    plans = {"tensor": tensor_plan, "sequence": sequence_plan}
    return {name: compared(Block, plan, mesh=mesh["tensor"], shard=mesh["data"]) for name, plan in plans.items()}


def one_misses() -> Report:
    """A module is in another mode on one rank: all ranks run eager."""

    def change(module: nn.Module, step: int) -> None:
        if step == 1 and dist.get_rank() == 1:
            module.attention.eval()

    return compared(Block, sequence_plan, change)


class Odd(nn.Module):
    def __init__(self, act: Callable[[nn.Module, Tensor], Tensor], width: int = WIDTH) -> None:
        super().__init__()
        self.layer, self.act = nn.Linear(WIDTH, width), act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self, x)


ODD: dict[str, tuple[nn.Module, Any]] = {
    "uneven": (Odd(lambda self, x: self.layer(x), width=5), ColwiseParallel()),
    "dropout": (
        Odd(lambda self, x: F.dropout(self.layer(x), 0.5).to_local()),
        ColwiseParallel(use_local_output=False),
    ),
    "result": (Odd(lambda self, x: self.layer(x)), ColwiseParallel(use_local_output=False)),
    "inside": (Odd(lambda self, x: self.layer(x)._local_tensor * 2), ColwiseParallel(use_local_output=False)),
    "numbers": (Odd(lambda self, x: self.layer(x) * float(x[0, 0, 0] > 0)), ColwiseParallel()),
    "own plan": (nn.Linear(WIDTH, 6), RowwiseParallel()),
}


def refused() -> Report:
    found, mesh = {}, init_device_mesh("cpu", (dist.get_world_size(),))
    for name, (module, plan) in ODD.items():
        module = parallelize_module(module.double(), mesh, {"layer": plan} if isinstance(module, Odd) else plan)
        try:
            add_tvm_dispatch(module, sample())
            found[name] = ""
        except UnsupportedModule as refusal:
            found[name] = str(refusal)
    return found


def other_uses() -> Report:
    """A second derivative (eager has none through ``from_local``: beside one process's), frozen parameters, a save."""
    mesh, seen = init_device_mesh("cpu", (dist.get_world_size(),)), []
    for dispatched in (False, True):
        module, x = made(FeedForward), sample()
        if dispatched:
            plan = {"w1": ColwiseParallel(), "w2": RowwiseParallel(), "w3": ColwiseParallel()}
            add_tvm_dispatch(parallelize_module(module, mesh, plan), x)
        (first,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        seen.append(torch.autograd.grad(first.square().sum(), x)[0])
    found = {"second": (seen[0] - seen[1]).abs().max().item(), "hits": stats(module).hits}
    with torch.no_grad():
        add_tvm_dispatch(module, x, freeze=True)
        before = module(x)
        module.w2.bias.to_local().add_(1.0)
        found["frozen"] = (module(x) - before - 1.0).abs().max().item()
    try:
        save_compiled(module, os.devnull + ".none")
    except UnsupportedModule as refusal:
        found["saved"] = str(refusal)
    return found


LAYERS: dict[str, Callable[[], Report]] = {
    **{name: lambda name=name: compared(*PLANS[name]) for name in PLANS},
    "one misses": one_misses,
    "refused": refused,
    "other uses": other_uses,
}
GROUPS = {"layers": 2, "sharded": 4, "raises": 2, "killed": 2}
"""Ranks of each group of processes, which run one after the other."""


def one_is_gone(folder: pathlib.Path, fault: str, pipe: tuple[int, int]) -> None:
    """A step of both ranks, then one of the first alone; its error is written down.

    The second rank is killed, or ends when the first one has: the first one holds the end of the pipe.
    """
    module, x = made(Block), sample()
    parallelize_module(module, init_device_mesh("cpu", (2,)), tensor_plan())
    add_tvm_dispatch(module, x)
    module(x).sum().backward()
    waits, ends = pipe
    if dist.get_rank():
        os.close(ends)
        if fault == "raises":
            os.read(waits, 1)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=1))
    try:
        module(x)
    except RuntimeError as error:
        calls = stats(module)
        found = {"error": str(error), "hits": calls.hits, "misses": dict(calls.misses)}
        (folder / "error.json").write_text(json.dumps(found))


def main(directory: str) -> None:
    torch.set_num_threads(1)
    choose_without_clock()
    failed = {}
    for name, size in GROUPS.items():
        folder, pipe = pathlib.Path(directory) / name, os.pipe()
        folder.mkdir()
        if size == 4:
            work = functools.partial(report_all, folder, {"sharded": sharded})
        elif name == "layers":
            work = functools.partial(report_all, folder, LAYERS)
        else:
            work = functools.partial(one_is_gone, folder, name, pipe)
        ranks = start(folder, size, work)
        for each in pipe:
            os.close(each)
        failed[name] = end(ranks)
    (pathlib.Path(directory) / "failed.json").write_text(json.dumps(failed))


if __name__ == "__main__":
    main(*sys.argv[1:])
