"""Bytes saved for the backward: eager, ours by strategy, and torch's own min-cut partitioner.

    python -m benchmarks.memory              the table; nothing is compiled; --json FILE writes its rows
    python -m benchmarks.memory --plans      the saved tensors of min_cut in every row, with reasons
    python -m benchmarks.memory --measure    min_cut measured on a dispatched call, not read from the plan
    python -m benchmarks.memory --peak       peak memory of training steps of a 12-layer BERT
    python -m benchmarks.memory --curve bert [--plot out.png]    bytes against recomputed flops, budget by budget

All count distinct storages that are saved for the backward, including dropout masks; not those alive anyway:
parameters, buffers, the input, and the module's results. Float32, train mode.
"""

from __future__ import annotations

import argparse
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.memory_blocks import BLOCKS, TRANSFORMERS, make
from benchmarks.results import Results, machine, versions
from benchmarks.saved_bytes import SavedBytes, saved_bytes, saved_for_backward
from benchmarks.tables import FORMS, header, line
from bridge import add_tvm_dispatch, lower
from bridge.show.report import kept_bytes
from partition import MinCut, build_graph, fewest_bytes
from partition.cost import flops, product, save_cost

#: The goal of a transformer's min_cut: saved bytes as a share of eager's.
GOAL = 0.6


@dataclass(frozen=True)
class Row:
    """Saved bytes of one module's backward by each strategy; ``min_cut`` from the plan, or measured on a call."""

    name: str
    saved: SavedBytes
    min_cut: int
    plan: str

    @property
    def share(self) -> float:
        """The saved bytes of ``min_cut`` as a share of eager's."""
        return self.min_cut / self.saved.eager


def measure(name: str, dispatched: bool = False) -> Row:
    """One row; ``dispatched`` compiles the module and measures ``min_cut`` on a call, as eager is measured."""
    module, x = make(name)
    lowered = lower(module, x)
    saved = saved_bytes(lowered, module, (x,))
    min_cut = saved.plan
    if dispatched:
        add_tvm_dispatch(module, x, on_miss="error")
        min_cut = saved_for_backward(module, lambda: module(x), x, outputs_free=True)
    return Row(name, saved, min_cut, lowered.plan.table())


def numbers(row: Row) -> dict[str, Any]:
    """The row for `benchmarks.tables`, in bytes."""
    saved = row.saved
    return {
        "module": row.name,
        "input": "x".join(map(str, BLOCKS[row.name][1])),
        "eager_bytes": saved.eager,
        "save_all_bytes": saved.save_all,
        "torch_min_cut_bytes": saved.torch_min_cut,
        "min_cut_bytes": row.min_cut,
        "inputs_bytes": saved.inputs_only,
        "note": saved.torch_note,
    }


def beyond(row: Row) -> str:
    """The reason why a row misses the goal, and the recomputed matrix products that would reach it."""
    module, x = make(row.name)
    lowered = lower(module, x)
    draws = kept_bytes(lowered) - lowered.plan.bytes
    graph = build_graph(lowered["cleaned"].function, lowered.num_primals, lowered.num_results)
    savable = {name for name in graph.candidates if save_cost(graph, name) is not None}
    eager = row.saved.eager
    bound = sum(graph.nodes[name].bytes for name in fewest_bytes(graph, savable)) + draws
    limit = int(GOAL * eager) - draws
    cut = MinCut(budget=limit, allow_matmul_recompute=True)
    lowered = lower(module, x, partition=cut)
    kept = kept_bytes(lowered)
    again = [name for name in lowered.plan.recomputed if product(graph.nodes[name]) is not None]
    share = sum(flops(graph, name) for name in again) / sum(flops(graph, name) for name in graph.forward)
    return (
        f"{row.name}: out of reach for the default, which never computes a matrix product again: no such choice keeps "
        f"less than {bound:,} bytes, {bound / eager:.4f} of eager (a minimum cut over bytes alone, hence exact; "
        f"min_cut: {row.min_cut:,}, {row.share:.4f}). {cut.name} with allow_matmul_recompute: {kept:,} bytes, "
        f"{kept / eager:.4f}, for products recomputed ({', '.join(again) or 'none'}) of {share:.1%} of the "
        "forward's flops."
    )


def saved_table(only: str, plans: bool, dispatched: bool, file: Path | None) -> None:
    """Prints the table, then the rows that miss a goal; ``file`` gets the rows as JSON."""
    columns = FORMS["memory"]
    print(header(columns))
    rows = []
    for name in BLOCKS:
        if only in name:
            rows.append(measure(name, dispatched))
            print(line(columns, numbers(rows[-1])), flush=True)
    if file:
        command = f"python -m benchmarks.memory{' --measure' if dispatched else ''}"
        Results.of("memory", command, [numbers(row) for row in rows]).save(file)
    above = [row for row in rows if row.name in TRANSFORMERS and row.share > GOAL]
    worse = [row for row in rows if row.saved.torch_min_cut is not None and row.min_cut > row.saved.torch_min_cut]
    print(f"\nabove torch's min-cut: {', '.join(row.name for row in worse) or 'no row'}")
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
    parser.add_argument("--curve", metavar="NAME", help="bytes against recomputed flops of a row of this name instead")
    parser.add_argument("--plot", metavar="FILE", help="draw the curve, too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table's rows there, too")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    print(f"{versions()}; {machine()}\n")
    if options.peak:
        from benchmarks.peak import peak_table

        peak_table(options.batch, options.seq)
    elif options.curve:
        from benchmarks.memory_curve import curve_table

        curve_table(options.curve, options.plot)
    else:
        saved_table(options.only, options.plans, options.measure, options.json)


if __name__ == "__main__":
    main()
