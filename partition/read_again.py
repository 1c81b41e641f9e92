"""Primals read at backward time: nodes and primals that autograd saves -> the forward values that must be saved.

Autograd saves a tensor, not its numbers: its formulas read the tensor's memory at the time of the backward, while
results computed from it earlier stay as they were. So the backward reads this primal itself, and recomputes the inner
values of the operation that reads it (a normalization's centred rows); results of operations on it are saved
(``recompute_all`` ignores this and rereads everything, like a checkpoint). For a parameter only values computed from
parameters alone are saved: a scaled activation would cost as much memory as the activation.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from partition.ops import SLICES, VIEWS


def results_of(
    nodes: Mapping[str, Any],
    forward: Collection[str],
    outputs: Collection[str | None],
    again: Mapping[str, tuple[bool, bool]],
    owners: Mapping[str, str],
) -> frozenset[str]:
    """Names of the forward's values that are results of operations on the primals.

    Args:
        nodes: of the graph (:class:`partition.graph.Node`), by name, in order.
        again: primal -> whether autograd saves views of it (they are no results then), whether it is a parameter.
        owners: variable name -> the operation that computes it.
    """
    readers: dict[str, set[str]] = {}
    for name in forward:
        for read in nodes[name].inputs:
            readers.setdefault(read, set()).add(owners.get(name, name))
    found: set[str] = set()
    seen = {name: viewed for name, (viewed, _) in again.items()}
    learned = {name for name, (_, is_parameter) in again.items() if is_parameter}
    others = again.keys() - learned
    for name, node in nodes.items() if again else ():
        if node.value is not None and learned.issuperset(node.inputs):  # constants are included
            learned.add(name)
        viewed = [seen[read] for read in node.inputs if read in seen]
        if name not in forward or not viewed:
            continue
        of_split = node.op == "TupleGetItem" and nodes[node.inputs[0]].op == "relax.split"
        is_view = node.op in VIEWS or node.op in SLICES or of_split
        is_inner = name not in outputs and readers.get(name) == {owners.get(name)}
        if not node.is_tensor or is_inner or (is_view and all(viewed)):
            seen[name] = all(viewed)
            others |= {name} if others.intersection(node.inputs) else set()
        elif name in learned or others.intersection(node.inputs):
            found.add(name)
    return frozenset(found)
