"""Bytes saved for the backward: eager, ours by strategy, and torch's own min-cut partitioner.

    python -m benchmarks.memory              the table; nothing is compiled
    python -m benchmarks.memory --plans      what min_cut saves in every row, and why
    python -m benchmarks.memory --measure    min_cut measured on a dispatched call, not read from the plan
    python -m benchmarks.memory --peak       peak memory of training steps of a 12-layer BERT

What counts, for all alike: distinct storages that are kept for the backward, dropout masks included; not what is alive
anyway: parameters, buffers, the input, and what the module returns. Float32, train mode.
"""

from __future__ import annotations

import argparse
import platform
import warnings
from dataclasses import dataclass

import torch
import tvm
from torch import Tensor, nn

from benchmarks.memory_blocks import BLOCKS, TRANSFORMERS
from benchmarks.saved import saved_for_backward
from benchmarks.torch_min_cut import torch_min_cut
from bridge import add_tvm_dispatch, lower
from bridge.lower import Lowered
from partition import Graph, MinCut, build_graph
from partition.cost import flops, keep_cost, product
from partition.network import minimum_cut

#: What a transformer's min_cut may save, as a share of what eager saves.
GOAL = 0.6


@dataclass(frozen=True)
class Row:
    """Bytes that each way saves for one module's backward."""

    name: str
    eager: int
    save_all: int
    torch_min_cut: int
    preparation: str
    min_cut: int
    recompute_all: int
    plan: str


def kept_bytes(lowered: Lowered) -> int:
    """Bytes of captures and of draws (masks): what a dispatched call keeps and would not have otherwise."""
    given = len(lowered.captured.module_tensors) + len(lowered.captured.arguments)
    plan = lowered.plan
    primals = zip(plan.saved_primals, plan.free, strict=False)  # free lists the primals first, then the outputs
    return plan.bytes + sum(saved.bytes for index, saved in primals if index >= given)


def make(name: str) -> tuple[nn.Module, Tensor]:
    """A row's module in train mode and its input, under the seed."""
    build, shape = BLOCKS[name]
    torch.manual_seed(0)
    return build().train(), torch.randn(shape, requires_grad=True)


def measure(name: str, dispatched: bool = False) -> Row:
    """One row; ``dispatched`` compiles the module and measures ``min_cut`` on a call, as eager is measured."""
    module, x = make(name)
    eager = saved_for_backward(module, lambda: module(x), x, outputs_free=True)
    theirs, preparation = torch_min_cut(module, (x,))
    lowered = {strategy: lower(module, x, partition=strategy) for strategy in ("save_all", "min_cut", "recompute_all")}
    kept = {strategy: kept_bytes(one) for strategy, one in lowered.items()}
    if dispatched:
        add_tvm_dispatch(module, x, on_miss="error")
        kept["min_cut"] = saved_for_backward(module, lambda: module(x), x, outputs_free=True)
    plan = lowered["min_cut"].plan.table()
    return Row(name, eager, kept["save_all"], theirs, preparation, kept["min_cut"], kept["recompute_all"], plan)


def line(row: Row) -> str:
    """The row in Markdown: MiB, then ratios."""
    mebibytes = (row.eager, row.save_all, row.torch_min_cut, row.min_cut, row.recompute_all)
    shares = (row.save_all, row.torch_min_cut, row.min_cut, row.recompute_all)
    shape = "x".join(map(str, BLOCKS[row.name][1]))
    cells = [row.name, shape, *(f"{b / 2**20:.2f}" for b in mebibytes), *(f"{b / row.eager:.3f}" for b in shares)]
    return "| " + " | ".join([*cells, row.preparation]) + " |"


def least(graph: Graph) -> int:
    """The fewest bytes of captures when anything but matrix products and their like may be computed again, at no price.

    Exact: a minimum cut over bytes alone.
    """
    keep = {name: graph.nodes[name].bytes if keep_cost(graph, name) is not None else None for name in graph.candidates}
    banned = {name for name in graph.candidates if name in graph.forward and product(graph.nodes[name]) is not None}
    again = {name: None if name in banned else 0 for name in graph.candidates}
    return minimum_cut(graph, keep, again, free=set(graph.output_index)).cost


def beyond(row: Row) -> str:
    """Why a row misses the goal, and the recomputation of matrix products that would reach it."""
    module, x = make(row.name)
    lowered = lower(module, x)
    draws = kept_bytes(lowered) - lowered.plan.bytes
    graph = build_graph(lowered["cleaned"].function, lowered.num_primals, lowered.num_results)
    bound = least(graph) + draws
    limit = int(GOAL * row.eager) - draws
    cut = MinCut(budget=limit, allow_matmul_recompute=True)
    lowered = lower(module, x, partition=cut)
    kept = kept_bytes(lowered)
    again = [name for name in lowered.plan.recomputed if product(graph.nodes[name]) is not None]
    share = sum(flops(graph, name) for name in again) / sum(flops(graph, name) for name in graph.forward)
    return (
        f"{row.name}: no cut that computes no product again keeps less than {bound:,} bytes, {bound / row.eager:.4f} "
        f"of eager (min_cut: {row.min_cut:,}, {row.min_cut / row.eager:.4f}). {cut.name} with allow_matmul_recompute: "
        f"{kept:,} bytes, {kept / row.eager:.4f}, for products computed again ({', '.join(again) or 'none'}) of "
        f"{share:.1%} of the forward's flops."
    )


def saved_table(only: str, plans: bool, dispatched: bool) -> None:
    """Prints the table, then what misses a goal."""
    ways = ["eager", "save_all", "torch's min-cut", "**min_cut**", "recompute_all"]
    header = ["module", "input", *(f"{way} MiB" for way in ways), *(f"{way} / eager" for way in ways[1:])]
    print("| " + " | ".join([*header, "torch's graph"]) + " |\n|---|---" + "|---:" * (len(header) - 2) + "|---|")
    rows = []
    for name in BLOCKS:
        if only in name:
            rows.append(measure(name, dispatched))
            print(line(rows[-1]), flush=True)
    above = [row for row in rows if row.name in TRANSFORMERS and row.min_cut > GOAL * row.eager]
    print(f"\nabove torch's min-cut: {', '.join(r.name for r in rows if r.min_cut > r.torch_min_cut) or 'no row'}")
    print(f"transformers above {GOAL} of eager: {', '.join(row.name for row in above) or 'no row'}")
    for row in above:
        print(f"\n{beyond(row)}")
    if plans:
        for row in rows:
            print(f"\n{row.name}\n\n{row.plan}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--plans", action="store_true", help="print min_cut's plan of every row")
    parser.add_argument("--measure", action="store_true", help="compile, and measure min_cut on a dispatched call")
    parser.add_argument("--peak", action="store_true", help="peak memory of a 12-layer BERT's training step instead")
    parser.add_argument("--batch", type=int, default=8, help="of --peak (default %(default)s)")
    parser.add_argument("--seq", type=int, default=128, help="of --peak (default %(default)s)")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    versions = f"torch {torch.__version__}, TVM {tvm.__version__}, {torch.get_num_threads()} threads"
    print(f"{versions}, {platform.machine()}\n")
    if options.peak:
        from benchmarks.peak import peak_table

        peak_table(options.batch, options.seq)
    else:
        saved_table(options.only, options.plans, options.measure)


if __name__ == "__main__":
    main()
