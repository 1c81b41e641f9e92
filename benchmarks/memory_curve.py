"""The memory curve: per budget, bytes saved for the backward against recomputed work, as a table and as a picture."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.memory_blocks import BLOCKS, make
from benchmarks.saved_bytes import eager_saved_bytes
from bridge import lower
from bridge.show.report import kept_bytes
from partition import Point, build_graph, curve
from partition.cost import flops


def curve_table(name: str, picture: str | None = None) -> None:
    """Prints the curve of the first row of the memory table whose name contains ``name``; draws it to ``picture``.

    ``SystemExit`` if there is none.
    """
    found = [row for row in BLOCKS if name.lower() in row.lower()]
    if not found:
        raise SystemExit(f"no row is called {name!r}; there are {', '.join(BLOCKS)}")
    module, x = make(found[0])
    lowered = lower(module, x)
    joint, counts = lowered["cleaned"].function, (lowered.num_primals, lowered.num_results)
    points = curve(joint, num_primals=counts[0], num_outputs=counts[1])
    graph = build_graph(joint, *counts)
    forward = sum(flops(graph, node) for node in graph.forward)
    draws = kept_bytes(lowered) - lowered.plan.bytes
    eager = eager_saved_bytes(module, (x,)) - draws  # a curve omits masks, which every point keeps
    print(f"{found[0]}, {'x'.join(map(str, x.shape))}; products may be recomputed\n")
    print("| strategy | saved MiB | / save_all | / eager | Gflop again | / forward | MiB moved again | reached |")
    print("|---|---:|---:|---:|---:|---:|---:|---|")
    for point in points:
        mebibytes = point.bytes / 2**20
        cells = [point.strategy, f"{mebibytes:.2f}", f"{point.bytes / points[0].bytes:.3f}"]
        cells += [f"{point.bytes / eager:.3f}", f"{point.flops / 1e9:.3f}", f"{point.flops / forward:.1%}"]
        print("| " + " | ".join([*cells, f"{point.moved / 2**20:.1f}", "yes" if point.reached else "no"]) + " |")
    if picture:
        plot(points, forward, eager, f"{found[0]}, {'x'.join(map(str, x.shape))}", picture)
        print(f"\n{picture}")


def plot(points: Sequence[Point], forward: int, eager: int, title: str, picture: str) -> None:
    """Draws saved MiB against recomputed flops (in per cent of the forward's) to an image file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    ordered = sorted(points, key=lambda point: (point.flops, -point.bytes))
    axes.step(
        [100 * point.flops / forward for point in ordered],
        [point.bytes / 2**20 for point in ordered],
        where="post",
        color="0.7",
        zorder=1,
    )
    labels: dict[tuple[int, int], list[str]] = {}  # several budgets may give one plan
    for point in points:
        label = point.strategy if point.budget is None else f"{point.budget:g}"
        labels.setdefault((point.flops, point.bytes), []).append(label)
    for (again, kept), names in labels.items():
        at = (100 * again / forward, kept / 2**20)
        axes.scatter(*at, s=30, color="tab:blue", zorder=2)
        axes.annotate(", ".join(names), at, textcoords="offset points", xytext=(5, 4), fontsize=8)
    axes.axhline(eager / 2**20, linestyle=":", color="0.4")
    axes.annotate("eager", (1, eager / 2**20), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=8)
    axes.set(xlabel="flops recomputed, % of the forward's", ylabel="saved tensors, MiB", title=title)
    axes.set_ylim(bottom=0)
    axes.set_xlim(right=125)  # room for the last label
    figure.savefig(picture, dpi=150)
    pyplot.close(figure)
