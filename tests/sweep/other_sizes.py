"""One case with a dynamic dimension: compiled once, compared with eager at the sample's and two other sizes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ShapesCollection
from torch.utils import _pytree as pytree

from bridge import add_tvm_dispatch, stats
from tests.bridge.compare import Call, assert_same, clone_tree, run

SIZES = (2, 5, 7)
"""Two of these sizes are run beside the sample's."""


class Missed(Exception):
    """Calls of other sizes ran eager; the message is the reason in the statistics."""


def of_sizes(call: Call, dimension: int) -> Iterator[list[tuple[Call, list[Tensor]]]]:
    """The call at its own and at two other sizes, each with its resized tensors: in one way after another.

    First all tensors with the first one's size in that dimension are resized, then the first alone. Larger tensors
    repeat the sample's numbers.
    """
    leaves, spec = pytree.tree_flatten((call.args, call.kwargs))
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.dim() > dimension]
    if not tensors or leaves[tensors[0]].layout is not torch.strided:
        return
    first = tensors[0]
    own = leaves[first].shape[dimension]
    alike = [i for i in tensors if leaves[i].shape[dimension] == own]
    sizes = list(dict.fromkeys((own, *SIZES)))[:3] if own >= 2 else SIZES
    for chosen in [alike] if alike == [first] else [alike, [first]]:
        calls = []
        for size in sizes if own else ():
            made = list(leaves)
            for i in chosen:
                made[i] = _resized(leaves[i], dimension, size)
            args, kwargs = pytree.tree_unflatten(made, spec)
            calls.append((Call(args, kwargs), [made[i] for i in chosen]))
        yield calls


def _resized(tensor: Tensor, dimension: int, size: int) -> Tensor:
    if tensor.shape[dimension] == size:
        return tensor
    at = torch.arange(size) % tensor.shape[dimension]
    return tensor.detach().index_select(dimension, at).requires_grad_(tensor.requires_grad)


def compare_sizes(
    module: nn.Module,
    calls: list[tuple[Call, list[Tensor]]],
    dimension: int,
    *,
    seed: int,
    process: Any,
    tolerances: dict[str, float],
) -> None:
    """Dispatches a copy for all sizes and compares it with eager at each.

    Raises:
        AssertionError: a difference.
        Missed: calls ran eager.
        Exception: any error of ``add_tvm_dispatch``.
    """
    eager, dispatched = copy.deepcopy(module), copy.deepcopy(module)
    (sample, dynamic), *_ = calls
    shapes = ShapesCollection()
    for tensor in dynamic:
        shapes[tensor] = {dimension: Dim.DYNAMIC}
    add_tvm_dispatch(dispatched, sample.args, sample_kwargs=sample.kwargs or None, dynamic_shapes=shapes)
    for step, (call, _) in enumerate(calls):
        mine, its = (Call(*clone_tree((call.args, call.kwargs), torch.float64)) for _ in range(2))
        actual = run(dispatched, mine, seed=seed + step, process=process)
        assert_same(actual, run(eager, its, seed=seed + step, process=process), **tolerances)
    if misses := stats(dispatched).misses:
        raise Missed("; ".join(misses))
