"""Graph colouring: a graph -> the strategies ``save_all`` and ``recompute_all``, and a colour per node.

Forward bindings are red. Bindings that the gradient reads turn blue and are saved. Parameters and forward outputs are
green: they are free. Constants are duplicated; a view is saved as its base, a tuple as its items, a mask cast to a
wider type as the mask.
"""

from __future__ import annotations

from partition.cost import is_item, is_slice, is_view, save_cost
from partition.graph import Choice, JointGraph
from partition.plan import captured_set


class SaveAll:
    """Saves every forward value that the gradient reads. Only views and widened masks are computed twice."""

    name = "save_all"

    def choose(self, graph: JointGraph) -> Choice:
        """Every savable forward value; the walk from the gradients reads only the first ones on each path."""
        saved = {}
        for name in graph.candidates:
            if _is_red(graph, name) and not is_slice(graph, graph.nodes[name]) and save_cost(graph, name) is not None:
                saved[name] = f"needed by {reader(graph, name)}"
        return Choice(saved)


class RecomputeAll:
    """Saves nothing: the backward recomputes everything from the inputs and parameters."""

    name = "recompute_all"

    def choose(self, graph: JointGraph) -> Choice:
        """No value, not even the outputs that the forward returns anyway."""
        return Choice(use_outputs=False)


def coloring(graph: JointGraph) -> dict[str, str]:
    """Node -> its colour under ``save_all``, for pictures and explanations.

    ``"red"``: forward. ``"blue"``: forward, and saved. ``"green"``: parameters and outputs that the backward reads for
    free. ``"white"``: other parameters. ``"black"``: backward.
    """
    captured = captured_set(graph, SaveAll().choose(graph))
    colors = {}
    for name, node in graph.nodes.items():
        if name in captured.primals or name in captured.outputs:
            colors[name] = "green"
        elif node.value is None:
            colors[name] = "white"
        elif name in captured.captures:
            colors[name] = "blue"
        else:
            colors[name] = "red" if name in graph.forward else "black"
    return colors


def reader(graph: JointGraph, name: str) -> str:
    """The first binding outside the forward that reads a value, directly or through views, as in "sum of db1"."""
    queue = [name]
    for read in queue:
        for user in graph.users[read]:
            node = graph.nodes[user]
            if user not in graph.forward and not is_view(node):
                return f"{node.op.removeprefix('relax.')} of {user}"
            queue.append(user)
    return "a gradient that is this very value"


def _is_red(graph: JointGraph, name: str) -> bool:
    """Whether the forward computes a value, or the tuple that it is an item of."""
    node = graph.nodes[name]
    return name in graph.forward or (is_item(graph, node) and node.inputs[0] in graph.forward)
