"""Train a BERT on several processes, its encoder layers dispatched to TVM, with DDP or FSDP2, and compare with eager.

    torchrun --standalone --nproc_per_node 2 -m examples.ddp_bert
    torchrun --standalone --nproc_per_node 2 -m examples.ddp_bert --fsdp

The layers are dispatched before the model is wrapped: FSDP2 replaces their parameters by shards. Nothing else in the
script depends on it.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from bridge import stats
from examples.layers import dispatch_layers, make_examples, make_model

STEPS, BATCH = 10, 4


def train(model: nn.Module, loader: DataLoader) -> list[float]:
    """``STEPS`` optimizer steps; this process's losses."""
    torch.manual_seed(1 + dist.get_rank())  # every process drops other units
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    losses = []
    for _, batch in zip(range(STEPS), loader, strict=False):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def run(options: argparse.Namespace, *, dispatch: bool) -> tuple[nn.Module, list[nn.Module], list[float]]:
    """One training: the model, its dispatched layers, the losses."""
    model = make_model(layers=options.layers, hidden=options.hidden).train()
    examples = make_examples(STEPS * BATCH * dist.get_world_size(), options.length)
    loader = DataLoader(examples, batch_size=BATCH, sampler=DistributedSampler(examples))
    layers = dispatch_layers(model, next(iter(loader))) if dispatch else []
    if options.fsdp:
        for layer in model.bert.encoder.layer:
            fully_shard(layer)
        wrapped = fully_shard(model)
    else:
        wrapped = DistributedDataParallel(model)
    return model, layers, train(wrapped, loader)


def full(parameter: Tensor) -> Tensor:
    """All of a parameter that may be sharded."""
    return (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--fsdp", action="store_true", help="FSDP2 (fully_shard) instead of DDP")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--length", type=int, default=64, help="tokens per sequence")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    eager, _, expected = run(options, dispatch=False)
    model, layers, losses = run(options, dispatch=True)
    pairs = zip(model.parameters(), eager.parameters(), strict=True)
    apart = max((full(mine) - full(other)).abs().max().item() for mine, other in pairs)
    if dist.get_rank() == 0:
        for step, (mine, other) in enumerate(zip(losses, expected, strict=True)):
            print(f"step {step:2}  eager {other:.6f}  dispatched {mine:.6f}")
        print(f"parameters after {STEPS} steps: {apart:.1e} apart")
        for layer in layers:
            print(f"{stats(layer).hits} hits, misses {dict(stats(layer).misses)}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
