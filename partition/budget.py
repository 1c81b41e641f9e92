"""Saving less than the minimum cut: compute more again until the captures fit a budget.

The cut bans matrix products and reductions from recomputation. A budget lifts the ban on reductions, and the one on
products if the user allows it. Captures are then given up one at a time, always the one that frees the most bytes per
flop of new work, until the rest fits; bytes beyond what the budget asks for count for nothing. What was given up in
excess is taken back, the dearest first.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from fractions import Fraction

from .cost import flops, product
from .crossing import crossing
from .graph import Graph
from .strategy import Choice

__all__ = ["fit"]


def fit(graph: Graph, choice: Choice, limit: int, *, forced: Collection[str] = (), allow_products: bool) -> Choice:
    """A choice whose captures hold at most ``limit`` bytes if that can be reached, with a note if it cannot.

    Args:
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
        notes = (*notes, _out_of_reach(limit, total, obstacles, size))
    return replace(choice, saved={name: saved[name] for name in graph.nodes if name in saved}, notes=notes)


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
