"""Saving less than the minimum cut: compute more again until the captures fit a budget.

The cut bans matrix products and reductions from recomputation. A budget lifts the ban on reductions, and the one on
products if the user allows it. Captures are then given up one at a time, always the one that frees the most bytes per
flop of new work, until the rest fits; bytes beyond what the budget asks for count for nothing. What was given up in
excess is taken back, the dearest first.

Where that gets stuck (no single capture can be given up without a ban), the minimum cut over bytes alone is taken: no
choice within the bans keeps less, so that it either fits or is the best there is, and the note says so.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from fractions import Fraction

from .coloring import reader
from .cost import flops, product, recompute_cost
from .crossing import crossing
from .graph import Graph
from .network import minimum_cut
from .strategy import Choice

__all__ = ["fewest_bytes", "fit"]


def fewest_bytes(
    graph: Graph, keepable: Collection[str], *, forced: Collection[str] = (), allow_products: bool = False
) -> tuple[str, ...] | None:
    """The captures that hold the fewest bytes of all choices within the bans, and of those the cheapest to complete.

    Exact: a minimum cut over bytes, the price of computing again only breaks ties. ``None`` if there is no finite cut.

    Args:
        keepable: what may be captured at all.
        forced: what must be.
        allow_products: whether matrix products, convolutions and library calls may be computed again.
    """
    price = {name: recompute_cost(graph, name) for name in graph.candidates}
    unit = 1 + sum(price.values())
    keep: dict[str, int | None] = {}
    again: dict[str, int | None] = {}
    for name in graph.candidates:
        banned = name in graph.forward and not allow_products and product(graph.nodes[name]) is not None
        keep[name] = (0 if name in forced else unit * graph.nodes[name].bytes) if name in keepable else None
        again[name] = None if banned or name in forced else price[name]
    free = {name for name in graph.output_index if graph.nodes[name].is_tensor}
    cut = minimum_cut(graph, keep, again, free)
    return None if cut.blocked else cut.kept


def fit(
    graph: Graph,
    choice: Choice,
    limit: int,
    *,
    keepable: Collection[str],
    forced: Collection[str] = (),
    allow_products: bool,
) -> Choice:
    """A choice whose captures hold at most ``limit`` bytes if that can be reached, with a note if it cannot.

    Args:
        keepable: what may be captured at all.
        forced: captures that must stay.
        allow_products: whether matrix products, convolutions and library calls may be computed again.
    """
    crossed = crossing(graph, choice)
    saved = {name: choice.saved[name] for name in crossed.captures}
    stops = set(crossed.outputs) | set(graph.primals)
    computed = set(crossed.computed)
    size = {name: graph.nodes[name].bytes for name in saved}
    total = sum(size.values())
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
            price = 1 + sum(flops(graph, done) for done in work if done in graph.forward)
            worth = Fraction(min(size[name], total - limit), price)
            if best is None or worth > best[0]:
                best = (worth, price, name, work)
        if best is None:
            break
        _, price, name, work = best
        del saved[name]
        computed.update(work)
        total -= size[name]
        given_up.append((price, name))
    for _, name in sorted(given_up, key=lambda item: -item[0]):
        if total + size[name] <= limit:
            saved[name] = choice.saved[name]
            total += size[name]
    notes = choice.notes
    if total > limit:
        least = fewest_bytes(graph, keepable, forced=forced, allow_products=allow_products)
        if least is not None and _captured(graph, least) < total:
            saved = {name: saved.get(name, f"fewest bytes: needed by {reader(graph, name)}") for name in least}
            total = _captured(graph, least)
    if total > limit:
        size = {name: graph.nodes[name].bytes for name in saved}
        obstacles = {name: obstacles.get(name) or _obstacle(graph, name, forced) for name in saved}
        notes = (*notes, _out_of_reach(limit, total, obstacles, size))
    return replace(choice, saved={name: saved[name] for name in graph.nodes if name in saved}, notes=notes)


def _captured(graph: Graph, names: Collection[str]) -> int:
    return sum(graph.nodes[name].bytes for name in crossing(graph, Choice(dict.fromkeys(names, ""))).captures)


def _obstacle(graph: Graph, name: str, forced: Collection[str]) -> str:
    """Why a value of the least choice has to stay."""
    if name in forced:
        return "the policy saves it"
    reason = product(graph.nodes[name])
    return f"{reason}; allow_matmul_recompute is off" if reason else "nothing smaller from which it could be computed"


def _new_work(graph: Graph, name: str, saved: Collection[str], stops: set[str], computed: set[str]) -> list[str]:
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


def _first_product(graph: Graph, work: list[str]) -> str | None:
    for name in work:
        reason = product(graph.nodes[name]) if name in graph.forward else None
        if reason is not None:
            return f"{name}: {reason}"
    return None


def _out_of_reach(limit: int, total: int, obstacles: dict[str, str], size: dict[str, int]) -> str:
    worst = sorted(obstacles, key=lambda name: -size[name])[:3]
    listed = "; ".join(f"{name}, {size[name]:,} bytes ({obstacles[name]})" for name in worst)
    return (
        f"a budget of {limit:,} bytes is out of reach: {total:,} bytes is the least. "
        f"In the way of {len(obstacles)} captures, the largest first: {listed}"
    )
