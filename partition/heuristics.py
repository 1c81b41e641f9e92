"""Saved-tensor heuristics: a choice of captures -> one that the backward reads faster, for as many bytes.

Values saved as they are read: a choice -> one that saves heads where it saved what the heads are views of.
Where a permutation is in the way of everybody who reads a saved value, and those are matrix products of a library that
wants operands in order, forward and backward would both copy it into that order. The permuted value has as many bytes;
saved in its place, it is copied once. A permutation that moves the last axis is not passed: rows stay rows.

Joined behind a result: a choice -> one that saves what the backward would join of what is copied to be saved.
The states of a loop are a result in another order, and the backward reads those before the steps: the first one, then
the others but the last. Results are the caller's, who may write into them, so that what is saved of one is a copy; a
part of what the forward computes is one, too. The states before the steps are one copy, and as many bytes as all after
them: saved in the place of the others, the backward makes no copy of its own.

Casts of parameters: a choice -> one that also saves what the forward has cast for a product and the backward reads.
Autocast casts each weight once per step, and keeps that until the backward is over. A cast that is made again reads
the weight and writes the copy again, which on a GPU takes a good part of the time of a small batch.

Rows computed again: a choice -> one that saves a product where it saved a softmax of it that nothing else stores.
A softmax that is dropped out in the kernel that computes it is written only to be saved, beside the product that it is
of, which the forward writes in any case. Saved in its place, the product costs no memory traffic; the backward reads
as many bytes, and computes the softmax in the kernel that reads it: for machines that wait for memory there.

Short chains: a choice -> one that saves what the backward would write again out of what it has written again.
Behind a residual block, a ReLU is made of the block's last product and of the ReLU before the block. Where products of
the backward read both, it would have to compute a whole stage of a network from its beginning before it can begin at
its end, in kernels that read each product once more than its gradient does. A value that is made of saved ones costs a
write, in a kernel that reads those for the gradient anyway; the values that are made of such a one are saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from partition.cost import is_item, is_view, product, read_by_kernel, view_base
from partition.graph import PERMUTATION, Choice, JointGraph, keeps_rows
from partition.ops import CHEAP, ROW, VIEWS
from partition.plan import captured_set

__all__ = [
    "bound_recompute_depth",
    "save_concatenations",
    "save_in_readers_layout",
    "save_rows_sources",
    "save_weight_casts",
]


_OF_MATRICES = ("relax.matmul", "library.biased_product")


def save_in_readers_layout(graph: JointGraph, choice: Choice) -> Choice:
    """The choice with values behind one chain of views replaced by the last permuted one, where products read that."""
    saved = {}
    for name, reason in choice.saved.items():
        last = name if name in graph.output_index else _last_permuted(graph, name)
        saved[last] = reason
    return replace(choice, saved=saved)


def _last_permuted(graph: JointGraph, name: str) -> str:
    found, permuted = name, False
    for view in _chain(graph, name):
        permuted = permuted or graph.nodes[view].op == PERMUTATION
        if permuted:
            found = view
    return found if _only_products_read(graph, found) else name


def _only_products_read(graph: JointGraph, name: str) -> bool:
    """Whether matrix products read a value, or views of it, and nothing that reads in any order."""
    readers = [graph.nodes[reader] for reader in graph.users[name]]
    return all(
        _only_products_read(graph, node.name) if node.op in VIEWS else node.op in _OF_MATRICES for node in readers
    )


def _chain(graph: JointGraph, name: str) -> Iterator[str]:
    """The views of a value, each the only reader of the one before, as far as rows stay rows."""
    while len(readers := graph.users[name]) == 1:
        node = graph.nodes[readers[0]]
        in_forward = node.name in graph.forward and node.name not in graph.output_index
        if node.op not in VIEWS or not in_forward or node.size != graph.nodes[name].size:
            return
        if node.op == PERMUTATION and not keeps_rows(node.value):
            return
        yield (name := node.name)


_JOIN = "relax.concat"


def save_concatenations(graph: JointGraph, choice: Choice) -> Choice:
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


def _is_result_as_view(graph: JointGraph, name: str) -> bool:
    """Whether a result has the same elements."""
    views = [user for user in graph.users[name] if user in graph.forward and graph.nodes[user].op in VIEWS]
    return any(view in graph.output_index or _is_result_as_view(graph, view) for view in views)


def _joined(graph: JointGraph, name: str, computed: set[str]) -> str | None:
    """What the backward joins of views of a value, if that is all that it does with it, and it needs no gradient."""
    readers = [user for user in graph.users[name] if user in computed or user in graph.adjoint]
    if len(readers) != 1 or readers[0] not in computed:
        return None
    (reader,) = readers
    if graph.nodes[reader].op == _JOIN:
        return reader if graph.nodes[reader].is_tensor else None
    return _joined(graph, reader, computed) if is_view(graph.nodes[reader]) else None


def save_weight_casts(graph: JointGraph, choice: Choice, parameters: int) -> Choice:
    """The choice with casts of the first ``parameters`` primals, of those that products of the forward read."""
    weights = set(graph.primals[:parameters])
    kept = {
        name: "kept: the forward has cast this parameter, as autocast's cache would"
        for name in graph.nodes
        if name in graph.forward
        and graph.nodes[name].op == "relax.astype"
        and all(view_base(graph, read) in weights for read in graph.nodes[name].inputs)
        and _is_for_products(graph, name)
    }
    return replace(choice, saved={**choice.saved, **kept})


def _is_for_products(graph: JointGraph, name: str) -> bool:
    readers = [graph.nodes[reader] for reader in graph.users[name] if reader in graph.forward]
    return any(
        product(node) is not None or (node.op in VIEWS and _is_for_products(graph, node.name)) for node in readers
    )


def save_rows_sources(graph: JointGraph, choice: Choice) -> Choice:
    """The choice with products in the place of rows that are made of them by cheap arithmetic with parameters."""
    saved = {}
    for name, reason in choice.saved.items():
        source = _source(graph, name)
        if source is None:
            saved[name] = reason
        else:
            saved[source] = f"saved for {name}, which is made of it again"
    return replace(choice, saved=saved)


def _source(graph: JointGraph, name: str) -> str | None:
    """The product that a saved row is computed from, if it is in memory, no larger, and the row is not."""
    node = graph.nodes[name]
    if node.op not in ROW or name in graph.output_index or read_by_kernel(graph, name, graph.forward):
        return None
    found = node.inputs[0] if len(node.inputs) == 1 else None
    while found is not None and not _is_of_a_product(graph, found):
        found = _operand(graph, found)
    if found is None or found not in graph.forward or graph.nodes[found].bytes > node.bytes:
        return None
    return found


def _is_of_a_product(graph: JointGraph, name: str) -> bool:
    """Whether a value is what a product computes, or one of several."""
    node = graph.nodes[name]
    return product(graph.nodes[node.inputs[0]] if is_item(graph, node) else node) is not None


def _operand(graph: JointGraph, name: str) -> str | None:
    """The operand of cheap arithmetic that is no parameter, or of a view; ``None`` if there is not exactly one."""
    node = graph.nodes[name]
    if node.op not in CHEAP and not is_view(node):
        return None
    others = [read for read in node.inputs if graph.nodes[read].value is not None]
    return others[0] if len(others) == 1 else None


def bound_recompute_depth(graph: JointGraph, choice: Choice) -> Choice:
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


def _is_written_twice(graph: JointGraph, name: str) -> bool:
    """Whether products of the forward and of the backward read a tensor."""
    return graph.nodes[name].is_tensor and all(
        read_by_kernel(graph, name, half) for half in (graph.forward, graph.adjoint)
    )
