"""Scheduling: the backward's bindings -> their order, recomputation as late and last uses as early as possible.

Two orders are tried, both deterministic, and the one with the lower peak of live bytes wins (the first on a tie):

* the joint function's own order of the adjoint bindings, which follows the forward in reverse;
* a list schedule that always takes the ready binding which adds least to the live bytes.

In both, what does not depend on a grad_out is computed just before its first reader.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable

from partition.cost import view_base
from partition.graph import JointGraph

__all__ = ["backward_order", "peak_bytes"]


def backward_order(graph: JointGraph, body: Collection[str]) -> list[str]:
    """The bindings ``body`` (names) in the order in which the backward computes them."""
    body = set(body)
    adjoint = [name for name in graph.nodes if name in body and name in graph.adjoint]
    natural = _with_demand(graph, body, adjoint)
    scheduled = _with_demand(graph, body, _list_schedule(graph, body, adjoint))
    return min((natural, scheduled), key=lambda order: peak_bytes(graph, order))


def peak_bytes(graph: JointGraph, order: Iterable[str]) -> int:
    """The most bytes of results alive at once when ``order`` runs; what comes from outside is not counted.

    A view lives in its base; a result of the function lives to the end.
    """
    order = list(order)
    inside = set(order)
    storage = {name: view_base(graph, name) for name in order}
    last: dict[str, int] = {}
    for position, name in enumerate(order):
        last[storage[name]] = position
        for read in graph.nodes[name].inputs:
            if read in inside:
                last[storage[read]] = position
    for name in graph.gradients:
        if name in inside:
            last[storage[name]] = len(order)
    dying: dict[int, int] = {}
    for base, position in last.items():
        if base in inside:
            dying[position] = dying.get(position, 0) + graph.nodes[base].bytes
    live = peak = 0
    for position, name in enumerate(order):
        if storage[name] == name:
            live += graph.nodes[name].bytes
        peak = max(peak, live)
        live -= dying.get(position, 0)
    return peak


def _with_demand(graph: JointGraph, body: set[str], adjoint: Iterable[str]) -> list[str]:
    """``adjoint`` in this order, everything else of ``body`` just before its first reader, unread results last."""
    done: dict[str, None] = {}
    leftovers = [name for name in graph.gradients if name in body]
    for target in (*adjoint, *leftovers):
        stack = [target]
        while stack:
            name = stack[-1]
            waiting = [read for read in graph.nodes[name].inputs if read in body and read not in done]
            if name in done or not waiting:
                stack.pop()
                done.setdefault(name)
            else:
                stack.extend(reversed(waiting))
    return list(done)


def _list_schedule(graph: JointGraph, body: set[str], adjoint: list[str]) -> list[str]:
    """Adjoint bindings, always next the ready one with the smallest net growth; ties go to the joint order."""
    position = {name: index for index, name in enumerate(adjoint)}
    readers = {name: [user for user in graph.users[name] if user in position] for name in body}
    uses = {name: len(users) for name, users in readers.items()}
    for name in graph.gradients:
        if name in uses:
            uses[name] += 1  # a result never dies
    waiting = {name: sum(read in position for read in graph.nodes[name].inputs) for name in adjoint}

    growth = {name: graph.nodes[name].bytes if view_base(graph, name) == name else 0 for name in adjoint}
    for name in adjoint:
        growth[name] -= sum(graph.nodes[read].bytes for read in graph.nodes[name].inputs if uses.get(read) == 1)

    heap = [(growth[name], position[name], name) for name in adjoint if not waiting[name]]
    heapq.heapify(heap)
    done: dict[str, None] = {}
    while heap:
        name = heapq.heappop(heap)[2]
        if name in done:
            continue  # an entry that a cheaper one has overtaken
        done[name] = None
        for user in readers[name]:
            waiting[user] -= 1
            if not waiting[user]:
                heapq.heappush(heap, (growth[user], position[user], user))
        for read in graph.nodes[name].inputs:
            if read not in uses:
                continue
            uses[read] -= 1
            if uses[read] == 1:
                for user in readers[read]:
                    if user in done:
                        continue
                    growth[user] -= graph.nodes[read].bytes
                    if not waiting[user]:
                        heapq.heappush(heap, (growth[user], position[user], user))
    return list(done)
