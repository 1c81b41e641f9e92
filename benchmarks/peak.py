"""Peak memory of a training step: eager beside partition strategies, and their loss curves.

The measure is torch's own accounting of its CPU allocator: under ``torch.profiler`` with ``profile_memory`` every
allocation and release of a tensor's memory is an event, also inside operators and programs, and the peak is the largest
running sum of one step. Memory from before the step (parameters, optimizer moments) is the same for all peers and not
counted; gradients are, because every step makes them anew. Not seen: scratch memory that a library takes past the
allocator, and the stack of our kernels. Resident pages (RSS) would include memory that the C library holds back.

The *arena*, the memory of a program's intermediates, is kept between calls, so a steady step does not allocate it. It
is counted separately, and added for the total: programs that run in turn share the largest one.
"""

from __future__ import annotations

import argparse
import copy
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks import train_bert
from benchmarks.text import build_tokenizer, corpus, masked_batches
from bridge import stats
from partition import MinCut

MODEL = "--layers 12 --hidden 256 --heads 4 --dispatch layers"

HEADER = "peak MiB, arenas MiB, sum MiB, sum / eager, saved by a layer MiB, last loss, largest difference of losses"

#: The peers: ``None`` is eager, everything else a ``partition``.
PEERS: dict[str, Any] = {
    "eager": None,
    "save_all": "save_all",
    "min_cut": "min_cut",
    "MinCut(budget=0.3)": MinCut(budget=0.3),
    "MinCut(budget=0.3, allow_matmul_recompute=True)": MinCut(budget=0.3, allow_matmul_recompute=True),
    "recompute_all": "recompute_all",
}


@dataclass(frozen=True)
class Measured:
    """The measurements of one peer: bytes of a step's peak, of arenas, of one layer's saved tensors; the losses."""

    peak: int
    arenas: int
    saved_tensors: int | None
    losses: list[float]


def peak_of(step: Callable[[], object]) -> int:
    """The peak of torch's CPU allocator during ``step()``, in bytes above its level before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.device_type() == DeviceType.CPU]
    changes.sort(key=lambda change: change[0])
    return max(itertools.accumulate(nbytes for _, nbytes in changes), default=0)


def arena_bytes(modules: Iterable[nn.Module]) -> int:
    """Bytes of the arena of one thread: the largest of the programs of dispatched modules."""
    entries = [entry for module in modules for entry in stats(module).entries]
    return max(program.arena_bytes for entry in entries for program in (entry.forward, entry.backward))


def train(model: nn.Module, batches: list[dict], options: argparse.Namespace, partition: Any) -> Measured:
    """Trains a copy of ``model`` for some steps; the peak is the last step's."""
    model = copy.deepcopy(model)
    modules = []
    if partition is not None:
        chosen = argparse.Namespace(**{**vars(options), "partition": partition})
        modules = train_bert.dispatch(model, batches[0], chosen)
    training = train_bert.make_training(model, options)
    for batch in batches[:-1]:
        training.step(batch)
    training.optimizer.zero_grad()
    peak = peak_of(lambda: training.step(batches[-1]))
    counts = train_bert.count(modules)
    if counts.hits != len(modules) * len(batches):
        raise RuntimeError(f"{counts.hits} calls of {len(modules)} layers were dispatched: {dict(counts.misses)}")
    saved_tensors = stats(modules[0]).entries[0].plan.bytes if modules else None
    return Measured(peak, arena_bytes(modules), saved_tensors, training.losses)


def peak_table(batch: int, seq: int, steps: int = 4) -> None:
    """Prints a table with a row per peer, in one process, from equal parameters, batches and seed."""
    options = train_bert.parse(f"{MODEL} --batch {batch} --seq {seq} --steps {steps}".split())
    documents = corpus()
    tokenizer = build_tokenizer(documents, options.vocabulary)
    batches = masked_batches(tokenizer, documents, steps=steps, batch=batch, length=seq, seed=0)
    model = train_bert.make_model(options, len(tokenizer))
    print(f"BertForMaskedLM {MODEL}, {batch} x {seq} tokens, step {steps} of AdamW, float32\n")
    columns = HEADER.split(", ")
    print("| | " + " | ".join(columns) + " |\n|---" + "|---:" * len(columns) + "|")
    eager = None
    for name, partition in PEERS.items():
        found = train(model, batches, options, partition)
        eager = eager or found
        whole = found.peak + found.arenas
        apart = max(abs(own - other) for own, other in zip(found.losses, eager.losses, strict=True))
        saved_tensors = "" if found.saved_tensors is None else f"{found.saved_tensors / 2**20:.2f}"
        cells = [f"{found.peak / 2**20:.1f}", f"{found.arenas / 2**20:.1f}", f"{whole / 2**20:.1f}"]
        cells += [f"{whole / eager.peak:.3f}", saved_tensors, f"{found.losses[-1]:.6f}", f"{apart:.1e}"]
        print("| " + " | ".join([name, *cells]) + " |", flush=True)
