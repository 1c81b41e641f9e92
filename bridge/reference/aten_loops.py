"""Marked loops of a traced graph: which nodes are the body of each, and the body run step by step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from bridge.capture import LOOP_MARKS

__all__ = ["MarkedLoop", "marked_loops"]

_FIRST, _PART, _LAST, _STEPS = LOOP_MARKS


class MarkedLoop:
    """One loop: its marks and its body, in order; ``depending``: what depends on a step; ``marks``: all of its own."""

    def __init__(self, nodes: list[fx.Node], number: int):
        self.marks = own = [node for node in nodes if _number(node) == number]
        self.first, self.part, self.last, self.steps = ([n for n in own if n.target is mark] for mark in LOOP_MARKS)
        given, self.made = {*self.first, *self.part}, [*self.last, *self.steps]
        needed = {node.args[0] for node in self.made}
        self.depending = depends = set(given)
        for node in nodes:
            if node not in self.made and any(source in depends for source in node.all_input_nodes):
                depends.add(node)
        for node in reversed(nodes):
            if node in needed and node in depends and node not in given:
                needed.update(node.all_input_nodes)
        self.body = [node for node in nodes if node in depends and node in needed and node not in given]
        *_, self.length, self.reverse = self.first[0].args

    def run(self, env: Mapping[fx.Node, Any], call: Callable[[fx.Node, Mapping], Any]) -> dict[fx.Node, Any]:
        """The values of the marks after the last step, and those of its body."""
        inner = dict(env)
        inner.update((node, env[node.args[0]]) for node in self.first)
        after: dict[fx.Node, fx.Node] = {
            node: next(last.args[0] for last in self.last if last.args[2] == node.args[3]) for node in self.first
        }
        ys: dict[fx.Node, list[torch.Tensor]] = {node: [] for node in self.steps}
        length = env[self.length] if isinstance(self.length, fx.Node) else self.length
        for step in reversed(range(length)) if self.reverse else range(length):
            inner.update((node, env[node.args[0]][step]) for node in self.part)
            for node in self.body:
                inner[node] = call(node, inner)
            for node, values in ys.items():
                values.append(inner[node.args[0]])
            made = {node: inner[node.args[0]] for node in self.last}
            inner.update([(node, inner[source]) for node, source in after.items()])
        found = {node: torch.stack(values[::-1] if self.reverse else values) for node, values in ys.items()}
        return {**made, **found, **{node: inner[node] for node in self.body}}


def marked_loops(graph: fx.Graph) -> list[MarkedLoop]:
    """The loops of a graph, in order."""
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    return [MarkedLoop(nodes, number) for number in sorted({_number(node) for node in nodes} - {None})]


def _number(node: fx.Node) -> int | None:
    """Of the loop that a mark belongs to."""
    return node.args[2 if node.target is _FIRST else 1] if node.target in LOOP_MARKS else None
