"""Indexing by tensors, order statistics, and elementwise functions that torch computes more exactly.

``x[indices]`` and ``index_put`` count negative indices from the end; embeddings, ``index_select`` and its kin take
none. Each raises torch's error for an index outside of its tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bridge.base.torch_internals import VF, aten
from bridge.library.registry import into_given, library_function


@library_function("embedding", aten.embedding)
def embedding(weight, indices, padding_idx, scale_grad_by_freq):
    return aten.embedding(weight, indices, padding_idx, bool(scale_grad_by_freq))


@into_given("embedding", aten.embedding)
def embedding_into(outs, weight, indices, padding_idx, scale_grad_by_freq):
    """Embedding into a given tensor, as torch's function computes it."""
    VF.index_select(weight, 0, indices.reshape(-1), out=outs[0].view(indices.numel(), weight.shape[1]))
    return True


@library_function("embedding_backward", aten.embedding_dense_backward)
def embedding_backward(grad, indices, num_weights, padding_idx, scale_grad_by_freq):
    return aten.embedding_dense_backward(grad, indices, num_weights, padding_idx, bool(scale_grad_by_freq))


def _at(rank: int, dims: list[int], indices: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """One entry per dimension: its index tensor, or ``None`` for the whole dimension."""
    places: list[torch.Tensor | None] = [None] * rank
    for dim, index in zip(dims, indices, strict=True):
        places[dim] = index
    return places


@library_function("index", aten.index)
def index(x, dims, indices):
    return aten.index.Tensor(x, _at(x.dim(), dims, indices))


@into_given("index", aten.index)
def index_into(outs, x, dims, indices):
    """Indexing into a given tensor, where the indices' dimensions come first, as in the result."""
    if list(dims) != list(range(len(dims))):
        return False
    aten.index.Tensor_out(x, _at(x.dim(), dims, indices), out=outs[0])
    return True


@library_function("index_backward", aten._index_put_impl_)
def index_backward(grad, extents, dims, indices):
    zeros = grad.new_zeros(extents)
    unsafe = True  # the forward has checked that indices are in range
    return aten._index_put_impl_(zeros, _at(len(extents), dims, indices), grad, True, unsafe)


@library_function("sorted_keys")
def sorted_keys(indices, table, dtype):
    """Keys ``index * length + position`` of rows, sorted, with a larger sentinel at the end."""
    places, dtype = indices.reshape(-1), getattr(torch, dtype)
    length = len(places)
    keys = VF.arange(length, dtype=dtype, device=places.device).add_(places, alpha=length)
    found = keys.new_full((length + 1,), table * length)
    VF.sort(keys, out=(found[:length], keys.new_empty(length, dtype=torch.long)))
    return found


@library_function("index_put", aten.index_put)
def index_put(x, values, dims, indices, accumulate):
    return aten.index_put(x, _at(x.dim(), dims, indices), values, bool(accumulate))


def _several(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of torch that returns a named tuple, as one that returns a plain tuple."""
    return lambda *arguments: tuple(function(*arguments))


def _along(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function along an axis, which it keeps as extent 1."""
    return _several(lambda x, axis: function(x, axis, keepdim=True))


_ALIKE = "index_select index_add index_copy erfc exp2 atan2 fmod remainder".split()

for _name, _function in {
    **{name: getattr(VF, name) for name in _ALIKE},
    "divide_floor": partial(VF.div, rounding_mode="floor"),
    "divide_trunc": partial(VF.div, rounding_mode="trunc"),
    **{name: _several(getattr(VF, name)) for name in ("cummax", "cummin")},
    **{f"{name}_dim": _along(getattr(VF, name)) for name in ("max", "min", "median", "nanmedian", "mode")},
    "sort": _several(lambda x, axis, down, stable: VF.sort(x, dim=axis, descending=bool(down), stable=bool(stable))),
    "topk": _several(lambda x, axis, k, largest, in_order: VF.topk(x, k, axis, bool(largest), bool(in_order))),
    "kthvalue": _several(lambda x, axis, k: VF.kthvalue(x, k, axis, keepdim=True)),
}.items():
    library_function(_name)(_function)


@library_function("binary_cross_entropy", aten.binary_cross_entropy)
def binary_cross_entropy(x, target):
    """The loss of each element; its logarithms are bounded below by -100."""
    return aten.binary_cross_entropy(x, target, None, 0)
