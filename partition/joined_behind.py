"""Joined behind a result: a choice -> one that saves what the backward would join of what is copied to be saved.

The states of a loop are a result in another order, and the backward reads those before the steps: the first one, then
the others but the last. Results are the caller's, who may write into them, so that what is saved of one is a copy; a
part of what the forward computes is one, too. The states before the steps are one copy, and as many bytes as all after
them: saved in the place of the others, the backward makes no copy of its own.
"""

from __future__ import annotations

from dataclasses import replace

from partition.captured_set import captured_set
from partition.cost import is_view, view_base
from partition.graph import Graph
from partition.ops import VIEWS
from partition.strategy import Choice

__all__ = ["with_joined_behind"]

_JOIN = "relax.concat"


def with_joined_behind(graph: Graph, choice: Choice) -> Choice:
    """The choice with concatenations in the place of such values, where nothing else in the backward reads them."""
    found = captured_set(graph, choice)
    computed, saved = set(found.computed), dict(choice.saved)
    for name in found.captures:
        base = view_base(graph, name)
        most = graph.nodes[base].bytes
        is_copied = graph.nodes[name].bytes < most or _is_result_as_view(graph, base)
        joined = _joined(graph, name, computed) if is_copied else None
        if joined is not None and graph.nodes[joined].bytes <= most:
            del saved[name]
            saved[joined] = f"joined by the forward: {name} would be copied to be saved, and again to be joined"
    return choice if saved.keys() == choice.saved.keys() else replace(choice, saved=saved)


def _is_result_as_view(graph: Graph, name: str) -> bool:
    """Whether a result has the same elements."""
    views = [user for user in graph.users[name] if user in graph.forward and graph.nodes[user].op in VIEWS]
    return any(view in graph.output_index or _is_result_as_view(graph, view) for view in views)


def _joined(graph: Graph, name: str, computed: set[str]) -> str | None:
    """What the backward joins of views of a value, if that is all that it does with it, and it needs no gradient."""
    readers = [user for user in graph.users[name] if user in computed or user in graph.adjoint]
    if len(readers) != 1 or readers[0] not in computed:
        return None
    (reader,) = readers
    if graph.nodes[reader].op == _JOIN:
        return reader if graph.nodes[reader].is_tensor else None
    return _joined(graph, reader, computed) if is_view(graph.nodes[reader]) else None
