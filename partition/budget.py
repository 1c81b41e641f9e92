"""Memory budget: a choice of saved tensors and a limit in bytes -> a choice that fits, by recomputing more.

For the minimum cut, matrix products and reductions must be saved. A budget allows recomputing reductions, and products
if the user allows it. Saved tensors are given up one at a time, always the one that frees the most bytes per flop of
new work, until the rest fits; bytes beyond the budget's need do not count. Unneeded sacrifices are taken back, the most
expensive first. Where no single tensor may be given up, the minimum cut over bytes alone replaces the choice: no
allowed choice saves fewer bytes. If it neither fits nor saves noticeably less, the greedy choice stays: the last bytes
are row statistics, and without them wide tensors would be recomputed. A note says so if nothing fits.

Flow network: the costs of a graph's values -> its minimum cut, the values to save.

Every value is split into an *in* and an *out* node; the edge between them carries the cost of saving the value. The
forward computes the source side of the cut, the backward computes the sink side::

    source ──recompute──► in(v) ──save──► out(v) ──∞──► in(w)   for every w that reads v
    source ──∞──► in(v)     where v must not be recomputed
    out(v) ──∞──► sink      where the backward requires v

Cutting ``in(v) -> out(v)`` saves v; cutting ``source -> in(v)`` pays for recomputing v. Values that are free
(parameters, forward outputs) are not in the network. Of all minimum cuts this takes the one nearest to the sink (the
unique one with the fewest values recomputed), so the result does not depend on the flow algorithm.

Infinite edges at the source and at the sink are contracted before any flow is pushed. That splits the network at every
matrix product; the components are solved one by one, in joint order, equal ones (layers, time steps) once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import TypeVar

from partition.cost import flops, product, recompute_cost
from partition.graph import Choice, JointGraph
from partition.plan import backward_reads, reader

_SOURCE, _SINK = "source", "sink"

Vertex = TypeVar("Node")


@dataclass(frozen=True)
class Cut:
    """A minimum cut: saved values in joint order, and its cost; ``blocked``: an infinite path, if none is finite."""

    saved: tuple[str, ...] = ()
    cost: int = 0
    blocked: tuple[str, ...] = ()


def minimum_cut(
    graph: JointGraph, save: Mapping[str, int | None], recompute: Mapping[str, int | None], free: Collection[str]
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
    """The network's weakly connected components without source and sink, each with its own source and sink edges."""
    beside: dict[str, list[str]] = {}
    for tail, head in edges:
        for node in (tail, head):
            if node not in (_SOURCE, _SINK):
                beside.setdefault(node, [])
        if tail != _SOURCE and head != _SINK:
            beside[tail].append(head)
            beside[head].append(tail)
    number: dict[str, int] = {}
    pieces: list[list[tuple[tuple[str, str], int]]] = []
    for node in beside:
        if node not in number:
            number.update(dict.fromkeys(_distances(node, beside.__getitem__), len(pieces)))
            pieces.append([])
    for (tail, head), capacity in edges.items():
        pieces[number[head if tail == _SOURCE else tail]].append(((tail, head), capacity))
    return pieces


def _solve(edges: Edges) -> tuple[int, frozenset[int]]:
    """The cost of a component's minimum cut, and its smallest sink side."""
    left: list[dict[int, int]] = [{} for _ in range(1 + max(max(tail, head) for tail, head, _ in edges))]
    for tail, head, capacity in edges:
        left[tail][head] = left[tail].get(head, 0) + capacity
        left[head].setdefault(tail, 0)
    source, sink, value = 0, 1, 0
    while sink in (far := _distances(source, lambda node: [head for head, most in left[node].items() if most])):
        value += _pushed(left, far, source, sink)
    return value, frozenset(_distances(sink, lambda node: [tail for tail in left[node] if left[tail][node]]))


def _pushed(left: list[dict[int, int]], far: Mapping[int, int], source: int, sink: int) -> int:
    """The blocking flow along shortest paths (Dinic); ``far``: distances from the source; ``left``: residual
    capacities, updated in place."""
    ahead = {node: [head for head in left[node] if far.get(head) == far[node] + 1] for node in far}
    value, path = 0, [source]
    while path:
        node = path[-1]
        if node == sink:
            steps = list(pairwise(path))
            flow = min(left[tail][head] for tail, head in steps)
            value += flow
            for tail, head in steps:
                left[tail][head] -= flow
                left[head][tail] += flow
            path = path[: 1 + next(place for place, (tail, head) in enumerate(steps) if not left[tail][head])]
        elif ahead[node] and left[node][ahead[node][-1]]:
            path.append(ahead[node][-1])
        elif ahead[node]:
            ahead[node].pop()
        else:
            path.pop()
            if path:
                ahead[path[-1]].pop()
    return value


def _distances(start: Vertex, next_of: Callable[[Vertex], Iterable[Vertex]]) -> dict[Vertex, int]:
    """Breadth-first search: reached node -> its distance from ``start``, nearer ones first."""
    found = {start: 0}
    waiting = deque([start])
    while waiting:
        node = waiting.popleft()
        for each in next_of(node):
            if each not in found:
                found[each] = found[node] + 1
                waiting.append(each)
    return found


def _infinite_path(
    graph: JointGraph, save: Mapping[str, int | None], recompute: Mapping[str, int | None], inner: list[str]
) -> tuple[str, ...]:
    """The values along a shortest path of infinite edges from source to sink, nothing contracted."""
    before: dict[str, list[str]] = {}

    def edge(tail: str, head: str) -> None:
        before.setdefault(head, []).append(tail)

    for name in inner:
        entry, exit_ = f"in {name}", f"out {name}"
        if recompute[name] is None:
            edge(_SOURCE, entry)
        if save[name] is None:
            edge(entry, exit_)
        for read in graph.nodes[name].inputs:
            if read in recompute:
                edge(f"out {read}", entry)
    for name in graph.required:
        if name in save:
            edge(f"out {name}", _SINK)
    far = _distances(_SINK, lambda node: before.get(node, ()))
    node, path = _SOURCE, []
    while node != _SINK:
        node = next(head for head, tails in before.items() if node in tails and far.get(head) == far[node] - 1)
        path.append(node)
    return tuple(dict.fromkeys(node.split(" ", 1)[1] for node in path[:-1]))


#: Least relative saving for which a budget that cannot be met replaces the whole choice.
_NOTICEABLE = Fraction(1, 100)


def fewest_bytes(
    graph: JointGraph, savable: Collection[str], *, forced: Collection[str] = (), allow_products: bool = False
) -> tuple[str, ...] | None:
    """The saved tensors with the fewest bytes of all allowed choices, and of these the cheapest to recompute from.

    Exact: a minimum cut over bytes, the cost of recomputation only breaks ties. ``None`` if there is no finite cut.

    Args:
        savable: values that may be saved.
        forced: values that must be saved.
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
    """A choice with at most ``limit`` bytes of saved tensors if that is possible, with a note if it is not.

    Args:
        savable: values that may be saved.
        forced: saved tensors that must stay.
        allow_products: whether matrix products, convolutions and library calls may be recomputed.
    """
    saved, given_up, obstacles = _give_up(graph, choice, limit, forced, allow_products)
    total, room, bound = _saved_bytes(graph, saved), limit, 0
    if total > limit:
        least = fewest_bytes(graph, savable, forced=forced, allow_products=allow_products)
        bound = total if least is None else min(total, _saved_bytes(graph, least))
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
    """Gives up saved tensors one at a time until the rest fits: the rest, the given-up ones with their flops, and by
    tensor the reason it had to stay."""
    reads = backward_reads(graph, choice)
    saved = {name: choice.saved[name] for name in reads.saved_tensors}
    stops = set(reads.outputs) | set(graph.primals)
    computed = set(reads.computed)
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


def _saved_bytes(graph: JointGraph, names: Collection[str]) -> int:
    reads = backward_reads(graph, Choice(dict.fromkeys(names, "")))
    return sum(graph.nodes[name].bytes for name in reads.saved_tensors)


def _obstacle(graph: JointGraph, name: str, forced: Collection[str]) -> str:
    """Why a value of the choice with the fewest bytes must be saved."""
    if name in forced:
        return "the policy saves it"
    reason = product(graph.nodes[name])
    return f"{reason}; allow_matmul_recompute is off" if reason else "nothing smaller from which it could be computed"


def _new_work(graph: JointGraph, name: str, saved: Collection[str], stops: set[str], computed: set[str]) -> list[str]:
    """The bindings that the backward must compute in addition if it can no longer read ``name``."""
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
        f"In the way of {len(obstacles)} saved tensors, the largest first: {listed}"
    )
