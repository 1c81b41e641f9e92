"""Memory budget: a choice of captures and a limit in bytes -> a choice that fits, by recomputing more.

For the minimum cut, matrix products and reductions must be saved. A budget allows recomputing reductions, and products
if the user allows it. Captures are then given up one at a time, always the one that frees the most bytes per flop of
new work, until the rest fits; bytes beyond what the budget asks for count for nothing. What was given up in excess is
taken back, the most expensive first.

Where that gets stuck (every single capture left must be saved), the minimum cut over bytes alone is taken: no allowed
choice saves fewer bytes, so that it either fits or is the best there is, and the note says so. If it neither fits nor
saves noticeably less than what was reached one by one, that is left: the last bytes are row statistics, and doing
without them means recomputing wide tensors.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from fractions import Fraction

from partition.captured_set import captured_set
from partition.coloring import reader
from partition.cost import flops, product, recompute_cost
from partition.graph import Choice, JointGraph
from partition.network import minimum_cut

__all__ = ["fewest_bytes", "fit"]

#: The share of the captures that a budget which cannot be met has to gain for a larger change of the choice.
_NOTICEABLE = Fraction(1, 100)


def fewest_bytes(
    graph: JointGraph, savable: Collection[str], *, forced: Collection[str] = (), allow_products: bool = False
) -> tuple[str, ...] | None:
    """The captures that hold the fewest bytes of all allowed choices, and of those the cheapest to recompute from.

    Exact: a minimum cut over bytes, the cost of recomputation only breaks ties. ``None`` if there is no finite cut.

    Args:
        savable: what may be captured at all.
        forced: what must be.
        allow_products: whether matrix products, convolutions and library calls may be recomputed.
    """

    cost = {name: recompute_cost(graph, name) for name in graph.candidates}
    unit = 1 + sum(cost.values())
    save: dict[str, int | None] = {}
    recompute: dict[str, int | None] = {}
    for name in graph.candidates:
        must_save = name in graph.forward and not allow_products and product(graph.nodes[name]) is not None
        save[name] = (0 if name in forced else unit * graph.nodes[name].bytes) if name in savable else None
        recompute[name] = None if must_save or name in forced else cost[name]
    cut = minimum_cut(graph, save, recompute, graph.free_outputs)
    return None if cut.blocked else cut.saved


def fit(
    graph: JointGraph,
    choice: Choice,
    limit: int,
    *,
    savable: Collection[str],
    forced: Collection[str] = (),
    allow_products: bool,
) -> Choice:
    """A choice whose captures hold at most ``limit`` bytes if that can be reached, with a note if it cannot.

    Args:
        savable: what may be captured at all.
        forced: captures that must stay.
        allow_products: whether matrix products, convolutions and library calls may be recomputed.
    """
    saved, given_up, obstacles = _give_up(graph, choice, limit, forced, allow_products)
    total, room, bound = _captured(graph, saved), limit, 0
    if total > limit:
        least = fewest_bytes(graph, savable, forced=forced, allow_products=allow_products)
        bound = total if least is None else min(total, _captured(graph, least))
        if bound <= limit or total - bound >= _NOTICEABLE * bound:
            saved = {name: choice.saved.get(name, f"fewest bytes: needed by {reader(graph, name)}") for name in least}
            total, given_up = bound, []
        room = max(limit, int(bound * (1 + _NOTICEABLE)))
    for _, name in sorted(given_up, key=lambda item: -item[0]):
        if total + graph.nodes[name].bytes <= room:
            saved[name] = choice.saved[name]
            total += graph.nodes[name].bytes
    notes = choice.notes
    if total > limit:
        obstacles = {name: obstacles.get(name) or _obstacle(graph, name, forced) for name in saved}
        notes = (*notes, _out_of_reach(graph, limit, total, bound, obstacles))
    return replace(choice, saved={name: saved[name] for name in graph.nodes if name in saved}, notes=notes)


def _give_up(
    graph: JointGraph, choice: Choice, limit: int, forced: Collection[str], allow_products: bool
) -> tuple[dict[str, str], list[tuple[int, str]], dict[str, str]]:
    """Captures given up one at a time until the rest fits, or none can be: the rest, those with their flops, and what
    stands in the way of the others."""
    captured = captured_set(graph, choice)
    saved = {name: choice.saved[name] for name in captured.captures}
    stops = set(captured.outputs) | set(graph.primals)
    computed = set(captured.computed)
    total = sum(graph.nodes[name].bytes for name in saved)
    given_up: list[tuple[int, str]] = []
    obstacles: dict[str, str] = {}
    while total > limit:
        best = None
        obstacles.clear()
        for name in saved:
            if name in forced:
                obstacles[name] = "the policy saves it"
                continue
            work = _new_work(graph, name, saved, stops, computed)
            stop = None if allow_products else _first_product(graph, work)
            if stop is not None:
                obstacles[name] = f"{stop}; allow_matmul_recompute is off"
                continue
            cost = 1 + sum(flops(graph, done) for done in work if done in graph.forward)
            worth = Fraction(min(graph.nodes[name].bytes, total - limit), cost)
            if best is None or worth > best[0]:
                best = (worth, cost, name, work)
        if best is None:
            break
        _, cost, name, work = best
        del saved[name]
        computed.update(work)
        total -= graph.nodes[name].bytes
        given_up.append((cost, name))
    return saved, given_up, obstacles


def _captured(graph: JointGraph, names: Collection[str]) -> int:
    return sum(graph.nodes[name].bytes for name in captured_set(graph, Choice(dict.fromkeys(names, ""))).captures)


def _obstacle(graph: JointGraph, name: str, forced: Collection[str]) -> str:
    """Why a value of the least choice has to stay."""
    if name in forced:
        return "the policy saves it"
    reason = product(graph.nodes[name])
    return f"{reason}; allow_matmul_recompute is off" if reason else "nothing smaller from which it could be computed"


def _new_work(graph: JointGraph, name: str, saved: Collection[str], stops: set[str], computed: set[str]) -> list[str]:
    """What the backward must compute in addition if it can no longer read ``name``."""
    work: dict[str, None] = {}
    stack = [name]
    while stack:
        node = stack.pop()
        if node in work or node in computed or node in stops or (node in saved and node != name):
            continue
        work[node] = None
        stack.extend(graph.nodes[node].inputs)
    return list(work)


def _first_product(graph: JointGraph, work: list[str]) -> str | None:
    for name in work:
        reason = product(graph.nodes[name]) if name in graph.forward else None
        if reason is not None:
            return f"{name}: {reason}"
    return None


def _out_of_reach(graph: JointGraph, limit: int, total: int, bound: int, obstacles: dict[str, str]) -> str:
    size = {name: graph.nodes[name].bytes for name in obstacles}
    worst = sorted(obstacles, key=lambda name: -size[name])[:3]
    listed = "; ".join(f"{name}, {size[name]:,} bytes ({obstacles[name]})" for name in worst)
    rest = f", and {total:,} are saved (the rest is less than {float(_NOTICEABLE):.0%})" if total > bound else ""
    return (
        f"a budget of {limit:,} bytes is out of reach: {bound:,} bytes is the least{rest}. "
        f"In the way of {len(obstacles)} captures, the largest first: {listed}"
    )
