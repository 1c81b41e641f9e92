"""Scenarios of :mod:`tests.bridge.distributed_worker` for a whole dispatched model, with several backward nodes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from bridge import add_tvm_dispatch, stats
from bridge.compile import Program
from bridge.dispatch import backward_nodes
from tests.bridge.distributed_worker import (
    ROWS,
    WIDTH,
    WORLD,
    Net,
    Report,
    dispatch_blocks,
    distance,
    full,
    make_net,
    train,
)

#: About a kilobyte: each layer of the small model is a bucket or more.
BUCKETS = {"bucket_cap_mb": 0.001}


@contextlib.contextmanager
def nodes_for_small_modules() -> Iterator[None]:
    before = backward_nodes.GRADIENTS_OF_NODE, backward_nodes.LEAST_BYTES
    backward_nodes.GRADIENTS_OF_NODE, backward_nodes.LEAST_BYTES = 3, 256
    try:
        yield
    finally:
        backward_nodes.GRADIENTS_OF_NODE, backward_nodes.LEAST_BYTES = before


def dispatch_whole(net: Net, **options: Any) -> Net:
    with nodes_for_small_modules():
        add_tvm_dispatch(net, torch.randn(ROWS, 6, dtype=net.first.weight.dtype), **options)
    return net


def report_whole(eager: nn.Module, net: nn.Module) -> Report:
    found = stats(net)
    return distance(eager, net) | {
        "hits": found.hits,
        "misses": dict(found.misses),
        "nodes": min(len(entry.programs.nodes) for entry in found.entries),
    }


def ddp(
    *,
    sync: bool = True,
    skip: int = 0,
    order: bool = False,
    on_miss: str = "eager",
    **options: Any,
) -> Report:
    nets, told = [], {}
    for dispatched in (False, True):
        net = make_net()
        if dispatched:
            dispatch_whole(net, on_miss=on_miss)
        wrapped = DistributedDataParallel(net, **options)
        accumulate: Callable[[bool], Any] = contextlib.nullcontext
        if not sync:

            def accumulate(last: bool, wrapped: DistributedDataParallel = wrapped) -> Any:
                return contextlib.nullcontext() if last else wrapped.no_sync()

        with nodes_for_small_modules():
            train(net, wrapped, accumulate=accumulate, skip_every=skip)
        if order and dispatched:
            told = {"events": events()}
        nets.append(net)
    return report_whole(*nets) | told


def events() -> list[str]:
    """The events of one backward, in order: segments that run, buckets whose all-reduce starts."""
    seen: list[str] = []

    def hook(state, bucket):  # DDP compares annotations, which are texts here
        seen.append("bucket")
        return allreduce_hook(state, bucket)

    executors = Program.__dict__["executor"]
    bind = executors.func

    def noted(program: Program) -> Callable[..., Any]:
        execute = bind(program)

        def run(*args: Any, **options: Any) -> Any:
            seen.append("segment" if program.name == "Net_backward" else program.name)
            return execute(*args, **options)

        return run

    executors.func = noted
    try:
        net = make_net()
        dispatch_whole(net)
        again = DistributedDataParallel(net, **BUCKETS)
        again.register_comm_hook(None, hook)
        for _ in range(3):  # buckets follow the order of the first backward
            seen.clear()
            again(torch.randn(ROWS, 6, dtype=torch.float64)).sum().backward()
    finally:
        executors.func = bind
    return [each for each in seen if each != "Net_forward"]


def fsdp(*, dtype: torch.dtype = torch.float64, accumulate: bool = False, **options: Any) -> Report:
    nets = []
    for dispatched in (False, True):
        net = make_net(dtype)
        if dispatched:
            dispatch_whole(net)
        fully_shard(net, **options)
        around: Callable[[bool], Any] = contextlib.nullcontext
        if accumulate:

            @contextlib.contextmanager
            def around(last: bool, net: Any = net) -> Any:
                net.set_requires_gradient_sync(last)
                yield

        train(net, net, accumulate=around)
        nets.append(net)
    return report_whole(*nets)


def fsdp_inside() -> Report:
    """Layers that are sharded inside of a model that is dispatched as a whole."""
    nets = []
    for dispatched in (False, True):
        net = make_net()
        if dispatched:
            dispatch_whole(net)
        for part in (*net.blocks, net):
            fully_shard(part)
        train(net, net)
        nets.append(net)
    return report_whole(*nets)


def mixed_precision() -> Report:
    """Parameters in bfloat16 while the model runs. Without BatchNorm, whose buffers are in full precision."""
    nets = []
    for kind in ("exact", "eager", "dispatched"):
        net = make_net(torch.float64 if kind == "exact" else torch.float32)
        net.blocks[1] = nn.Identity()
        if kind == "dispatched":
            dispatch_whole(net, on_miss="compile")
        policy = MixedPrecisionPolicy(param_dtype=None if kind == "exact" else torch.bfloat16)
        fully_shard(net, mp_policy=policy)
        with nodes_for_small_modules():
            train(net, net)
        nets.append(net)
    exact, eager, dispatched = ({name: full(p) for name, p in net.named_parameters()} for net in nets)

    def off(values: dict[str, torch.Tensor]) -> float:
        return sum((values[name].double() - exact[name]).square().sum().item() for name in exact) ** 0.5

    return {"ours": off(dispatched), "eager": off(eager), "hits": stats(nets[2]).hits}


def tensor_parallel() -> Report:
    """Parameters that become distributed after dispatch was added."""
    nets = []
    for dispatched in (False, True):
        net = make_net()
        net.eval()  # each process draws masks for its own part
        if dispatched:
            dispatch_blocks(net)
        plan = {"blocks.0.layers.0": ColwiseParallel(output_layouts=Replicate())}
        parallelize_module(net, init_device_mesh("cpu", (WORLD,)), plan)
        torch.manual_seed(0)
        x = torch.randn(ROWS, 6, dtype=torch.float64)
        net(x).square().mean().backward()
        nets.append(net)
    found = [stats(block) for block in nets[1].blocks]
    gradients = [[full(parameter.grad) for parameter in net.parameters()] for net in nets]
    return {
        "difference": max((a - b).abs().max().item() for a, b in zip(*gradients, strict=True)),
        "hits": [each.hits for each in found],
        "misses": [dict(each.misses) for each in found],
    }


def _perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH))


#: A module, and the plan that it gets after it was dispatched.
PLANS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "columns": (lambda: nn.Linear(WIDTH, 6), lambda: ColwiseParallel(output_layouts=Replicate())),
    "rows": (lambda: nn.Linear(WIDTH, 6), lambda: RowwiseParallel(input_layouts=Replicate())),
    "sequence": (lambda: nn.LayerNorm(WIDTH), lambda: SequenceParallel(use_local_output=True)),
    "inside": (_perceptron, lambda: {"0": ColwiseParallel(), "2": RowwiseParallel()}),
}


def parallel_plans() -> Report:
    """Plan → distance of results and gradients from the eager module's, and statistics of its calls."""
    mesh, x = init_device_mesh("cpu", (WORLD,)), torch.randn(3, 4, WIDTH, dtype=torch.float64)
    found = {}
    for name, (make, plan) in PLANS.items():
        made, modules = [], []
        for dispatched in (False, True):
            torch.manual_seed(0)
            modules.append(module := make().double())
            if dispatched:
                add_tvm_dispatch(module, x)
            parallelize_module(module, mesh, plan())
            result = module(x)
            result.square().mean().backward()
            made.append([full(each) for each in (result, *(p.grad for p in module.parameters()))])
        calls = stats(modules[1])
        off = max((a - b).abs().max().item() for a, b in zip(*made, strict=True))
        found[name] = {"difference": off, "hits": calls.hits, "misses": dict(calls.misses)}
    return found


def distributed_parameters() -> Report:
    """Errors, dispatched and eager: parameters sharded without a plan; a shard as argument of plain parameters."""
    mesh, x = init_device_mesh("cpu", (WORLD,)), torch.randn(4, WIDTH, dtype=torch.float64)
    whole = distribute_tensor(x, mesh, [Replicate()])
    found = {}
    for name, given in (("parameters", x), ("argument", whole), ("both", whole)):
        said = []
        for dispatched in (False, True):
            torch.manual_seed(0)
            module = nn.Linear(WIDTH, 6).double()
            if dispatched:
                add_tvm_dispatch(module, x)
            if name != "argument":
                for key, parameter in list(module.named_parameters()):
                    module.register_parameter(key, nn.Parameter(distribute_tensor(parameter.data, mesh, [Replicate()])))
            try:
                said.append(full(module(given)).tolist())
            except RuntimeError as error:
                said.append(str(error).partition(":")[0])
        found[name] = {"same": said[0] == said[1], "hits": stats(module).hits, "misses": dict(stats(module).misses)}
    return found


WHOLE: dict[str, Callable[[], Report]] = {
    "whole ddp": lambda: ddp(order=True, **BUCKETS),
    "whole ddp no_sync": lambda: ddp(sync=False, **BUCKETS),
    "whole ddp bucket_view": lambda: ddp(gradient_as_bucket_view=True, **BUCKETS),
    "whole ddp static_graph": lambda: ddp(static_graph=True, **BUCKETS),
    "whole ddp unused": lambda: ddp(skip=3, on_miss="compile", find_unused_parameters=True, **BUCKETS),
    "whole fsdp": lambda: fsdp(reshard_after_forward=False),
    "whole fsdp accumulate": lambda: fsdp(accumulate=True),
    "whole fsdp mixed": mixed_precision,
    "fsdp inside": fsdp_inside,
    "tensor parallel": tensor_parallel,
    "parallel plans": parallel_plans,
    "distributed parameters": distributed_parameters,
}
