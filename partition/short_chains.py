"""Short chains: a choice -> one that saves what the backward would write again out of what it has written again.

Behind a residual block, a ReLU is made of the block's last product and of the ReLU before the block. Where products of
the backward read both, it would have to compute a whole stage of a network from its beginning before it can begin at
its end, in kernels that read each product once more than its gradient does. A value that is made of saved ones costs a
write, in a kernel that reads those for the gradient anyway; the values that are made of such a one are saved.
"""

from __future__ import annotations

from dataclasses import replace

from partition.captured_set import captured_set
from partition.cost import is_view, read_by_kernel
from partition.graph import Graph
from partition.strategy import Choice

__all__ = ["with_short_chains"]


def with_short_chains(graph: Graph, choice: Choice) -> Choice:
    """The choice with those values, of what the forward writes for its products in any case."""
    computed = [name for name in captured_set(graph, choice).computed if name in graph.forward]
    written = {name for name in computed if not is_view(graph.nodes[name]) and _is_written_twice(graph, name)}
    behind: set[str] = set()  # what is made of a written value, by way of others or not
    saved = {}
    for name in computed:
        if any(read in written or read in behind for read in graph.nodes[name].inputs):
            behind.add(name)
            if name in written:
                saved[name] = "kept: the backward would compute it from another value that it computes for a product"
    return replace(choice, saved={**choice.saved, **saved})


def _is_written_twice(graph: Graph, name: str) -> bool:
    """Whether products of the forward and of the backward read a tensor."""
    return graph.nodes[name].is_tensor and all(
        read_by_kernel(graph, name, half) for half in (graph.forward, graph.adjoint)
    )
