"""Saved-tensor heuristics: a choice of saved tensors -> one that the backward reads faster, for as many bytes.

Save in the readers' layout: a choice -> one that saves permuted values instead of the values that they view.
Where matrix products that want contiguous operands are the only readers, forward and backward would both copy the value
into that order. The permuted value has as many bytes, and is copied once. A permutation that moves the last axis stays.

Save the concatenation: a choice -> one that saves a concatenation in the backward instead of its operand.
The states of a loop are a result with another axis order, and the backward reads the states before the steps: the first
one, then all but the last. The caller may write into results, so a result is saved as a copy, as is a slice. The states
before the steps are one copy, with as many bytes: saved instead, they leave the backward nothing to copy.

Save autocast weights: a choice -> one that also saves casts of parameters for products, where the backward reads them.
Autocast casts each weight once per step, and keeps the cast until the backward is over. A second cast takes, on a GPU,
a large share of the time of a small batch.

Save logits instead of a softmax: a choice -> one that saves a product in place of a softmax that is not in memory.
A softmax whose kernel also applies dropout is written only to be saved, beside its operand, the product, which the
forward writes anyway. The product costs no further memory traffic, and the backward reads as many bytes; it recomputes
the softmax in the kernel that reads it. For machines bound by memory traffic.

Bound the recompute depth: a choice -> one without recomputation of a written value from another recomputed one.
A ReLU after a residual block is computed from the block's last product and the ReLU before the block. Where products of
the backward read both, the backward would recompute a whole stage of a network before its first gradient, in kernels
that read each product once more. A value made of saved ones costs one write, in a kernel that reads its operands
anyway; values made of a recomputed one are saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from partition.cost import is_item, is_view, product, read_by_kernel, view_base
from partition.graph import PERMUTATION, Choice, JointGraph, keeps_rows
from partition.ops import CHEAP, ROW, VIEWS
from partition.plan import backward_reads

_OF_MATRICES = ("relax.matmul", "library.matmul_bias")


def save_in_readers_layout(graph: JointGraph, choice: Choice) -> Choice:
    """Replaces values by the last permuted one in their chain of views, where only products read it."""
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
    """Whether matrix products are the only readers of a value and its views."""
    readers = [graph.nodes[reader] for reader in graph.users[name]]
    return all(
        _only_products_read(graph, node.name) if node.op in VIEWS else node.op in _OF_MATRICES for node in readers
    )


def _chain(graph: JointGraph, name: str) -> Iterator[str]:
    """The forward's chain of views of a value, each the only reader of the previous one, while the last axis stays."""
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
    """Replaces saved values by the concatenation that is their only use in the backward."""
    found = backward_reads(graph, choice)
    computed, saved = set(found.computed), dict(choice.saved)
    for name in found.saved_tensors:
        base = view_base(graph, name)
        most = graph.nodes[base].bytes
        is_copied = graph.nodes[name].bytes < most or _is_result_as_view(graph, base)
        joined = _joined(graph, name, computed) if is_copied else None
        if joined is not None and graph.nodes[joined].bytes <= most:
            del saved[name]
            saved[joined] = f"joined by the forward: {name} would be copied to be saved, and again to be joined"
    return choice if saved.keys() == choice.saved.keys() else replace(choice, saved=saved)


def _is_result_as_view(graph: JointGraph, name: str) -> bool:
    """Whether a forward output has the same elements."""
    views = [user for user in graph.users[name] if user in graph.forward and graph.nodes[user].op in VIEWS]
    return any(view in graph.output_index or _is_result_as_view(graph, view) for view in views)


def _joined(graph: JointGraph, name: str, computed: set[str]) -> str | None:
    """A value's only use in the backward, if it is a concatenation (through views) that depends on no grad_out."""
    readers = [user for user in graph.users[name] if user in computed or user in graph.adjoint]
    if len(readers) != 1 or readers[0] not in computed:
        return None
    (reader,) = readers
    if graph.nodes[reader].op == _JOIN:
        return reader if graph.nodes[reader].is_tensor else None
    return _joined(graph, reader, computed) if is_view(graph.nodes[reader]) else None


def save_weight_casts(graph: JointGraph, choice: Choice, parameters: int) -> Choice:
    """Adds the forward's casts of the first ``parameters`` primals that its products read."""
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
    """Replaces softmaxes by the products from which cheap arithmetic with parameters computes their operands."""
    saved = {}
    for name, reason in choice.saved.items():
        source = _source(graph, name)
        if source is None:
            saved[name] = reason
        else:
            saved[source] = f"saved for {name}, which is made of it again"
    return replace(choice, saved=saved)


def _source(graph: JointGraph, name: str) -> str | None:
    """The product from which a saved softmax is computed, if it is no larger and the softmax is not in memory."""
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
    """Whether a value is the result, or one of several, of a matrix product, convolution or library call."""
    node = graph.nodes[name]
    return product(graph.nodes[node.inputs[0]] if is_item(graph, node) else node) is not None


def _operand(graph: JointGraph, name: str) -> str | None:
    """The only non-parameter operand of cheap arithmetic or a view; ``None`` if there is not exactly one."""
    node = graph.nodes[name]
    if node.op not in CHEAP and not is_view(node):
        return None
    others = [read for read in node.inputs if graph.nodes[read].value is not None]
    return others[0] if len(others) == 1 else None


def bound_recompute_depth(graph: JointGraph, choice: Choice) -> Choice:
    """Adds the values that products read in both halves and whose recomputation reads another value of this kind."""
    computed = [name for name in backward_reads(graph, choice).computed if name in graph.forward]
    written = {name for name in computed if not is_view(graph.nodes[name]) and _is_written_twice(graph, name)}
    behind: set[str] = set()  # values made of a written value, directly or not
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
