"""Flow network: the costs of a graph's values -> its minimum cut, the values to save.

Every value is split into an *in* and an *out* node; the edge between them carries the cost of saving the value. The
source side of the cut is what the forward computes, the sink side is what the backward computes::

    source ──recompute──► in(v) ──save──► out(v) ──∞──► in(w)   for every w that reads v
    source ──∞──► in(v)     where v must not be recomputed
    out(v) ──∞──► sink      where the backward requires v

Cutting ``in(v) -> out(v)`` saves v; cutting ``source -> in(v)`` pays for recomputing v. Values that are free
(parameters, forward outputs) are not in the network. Of all minimum cuts this takes the one nearest to the sink (the
unique one with the fewest values recomputed), so the result does not depend on the flow algorithm.

Infinite edges at the source and at the sink are contracted before any flow is pushed. That takes the network apart at
every matrix product; the pieces are solved one by one, in joint order, those of equal layers or time steps once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import networkx as nx

from .graph import Graph

__all__ = ["Cut", "minimum_cut"]

_SOURCE, _SINK = "source", "sink"


@dataclass(frozen=True)
class Cut:
    """A minimum cut: the values saved, in joint order, and the integer cost; or, if there is no finite cut,
    ``blocked``: the values along an infinite path."""

    saved: tuple[str, ...] = ()
    cost: int = 0
    blocked: tuple[str, ...] = ()


def minimum_cut(
    graph: Graph, save: Mapping[str, int | None], recompute: Mapping[str, int | None], free: Collection[str]
) -> Cut:
    """The cheapest set of values to save.

    Args:
        save: per candidate, the cost of saving it, or ``None`` if it cannot be saved.
        recompute: per candidate, the cost of computing it in the backward, or ``None`` if it must not be.
        free: candidates that the backward can read at no cost.
    """
    inner = [name for name in graph.candidates if name not in free]
    required = set(graph.required)
    ends = {name: _ends(name, save[name], recompute[name], name in required) for name in inner}
    infinite = 1 + sum(cost for name in inner for cost in (save[name], recompute[name]) if cost is not None)
    edges: dict[tuple[str, str], int] = {}

    def edge(tail: str, head: str, capacity: int) -> None:
        if capacity and tail != head and tail != _SINK and head != _SOURCE:
            edges[tail, head] = min(infinite, edges.get((tail, head), 0) + capacity)

    for name in inner:
        entry, exit_ = ends[name]
        edge(entry, exit_, infinite if save[name] is None else save[name])
        edge(_SOURCE, entry, infinite if recompute[name] is None else recompute[name])
        for read in graph.nodes[name].inputs:
            if read in ends:
                edge(ends[read][1], entry, infinite)

    direct = edges.pop((_SOURCE, _SINK), 0)
    sink_side, cost = {_SINK}, direct
    solved: dict[Edges, tuple[int, frozenset[int]]] = {}
    for piece in _pieces(edges):
        number = {_SOURCE: 0, _SINK: 1}
        numbered = tuple(
            (number.setdefault(tail, len(number)), number.setdefault(head, len(number)), capacity)
            for (tail, head), capacity in piece
        )
        if numbered not in solved:
            solved[numbered] = _solve(numbered)
        value, side = solved[numbered]
        cost += value
        sink_side.update(name for name, place in number.items() if place in side)
    if cost >= infinite:
        return Cut(blocked=_infinite_path(graph, save, recompute, inner))
    saved = tuple(name for name in inner if ends[name][0] not in sink_side and ends[name][1] in sink_side)
    return Cut(saved, cost)


def _ends(name: str, save: int | None, recompute: int | None, required: bool) -> tuple[str, str]:
    """The in and the out node of a value, contracted with source, sink, or each other across infinite edges."""
    entry = _SOURCE if recompute is None else f"in {name}"
    exit_ = _SINK if required else f"out {name}"
    if save is None and entry == _SOURCE:
        exit_ = _SINK if required else _SOURCE
    elif save is None:
        entry = exit_ = _SINK if required else entry
    return entry, exit_


Edges = tuple[tuple[int, int, int], ...]
"""``(tail, head, capacity)``: node 0 is the source, node 1 the sink."""


def _pieces(edges: Mapping[tuple[str, str], int]) -> list[list[tuple[tuple[str, str], int]]]:
    """The network without source and sink, in weakly connected pieces, each with its own source and sink edges."""
    whole = nx.Graph()
    for tail, head in edges:
        whole.add_nodes_from(node for node in (tail, head) if node not in (_SOURCE, _SINK))
        if tail != _SOURCE and head != _SINK:
            whole.add_edge(tail, head)
    number = {node: index for index, nodes in enumerate(nx.connected_components(whole)) for node in nodes}
    pieces: list[list[tuple[tuple[str, str], int]]] = [[] for _ in range(1 + max(number.values(), default=-1))]
    for (tail, head), capacity in edges.items():
        pieces[number[head if tail == _SOURCE else tail]].append(((tail, head), capacity))
    return pieces


def _solve(edges: Edges) -> tuple[int, frozenset[int]]:
    """The cost of a piece's minimum cut and its smallest sink side."""
    source, sink = 0, 1
    piece = nx.DiGraph()
    for tail, head, capacity in edges:
        piece.add_edge(tail, head, capacity=capacity)
    if sink not in piece:
        return 0, frozenset()
    if source not in piece:
        return 0, frozenset(nx.ancestors(piece, sink))
    value, (_, side) = nx.minimum_cut(piece, source, sink, flow_func=nx.algorithms.flow.preflow_push)
    return value, frozenset(side)


def _infinite_path(
    graph: Graph, save: Mapping[str, int | None], recompute: Mapping[str, int | None], inner: list[str]
) -> tuple[str, ...]:
    """The values along a shortest path of infinite edges from source to sink, nothing contracted."""
    network = nx.DiGraph()
    for name in inner:
        entry, exit_ = f"in {name}", f"out {name}"
        if recompute[name] is None:
            network.add_edge(_SOURCE, entry)
        if save[name] is None:
            network.add_edge(entry, exit_)
        network.add_edges_from((f"out {read}", entry) for read in graph.nodes[name].inputs if read in recompute)
    network.add_edges_from((f"out {name}", _SINK) for name in graph.required if name in save)
    path = nx.shortest_path(network, _SOURCE, _SINK)
    return tuple(dict.fromkeys(node.split(" ", 1)[1] for node in path[1:-1]))
