"""How many bytes a forward keeps for its backward, measured the same way for eager and dispatched modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

__all__ = ["saved_for_backward"]


def saved_for_backward(
    module: nn.Module, forward: Callable[[], object], arguments: object = (), *, outputs_free: bool = False
) -> int:
    """Bytes of the distinct storages that autograd saves during ``forward()``.

    Storages of parameters, buffers and ``arguments`` are free: they are alive anyway; with ``outputs_free`` also those
    of what ``forward()`` returns. The measure is ``torch.autograd.graph.saved_tensors_hooks``, so what escapes autograd
    is not seen. Each storage counts in full, also if only a view of it is saved, because in full is how it stays alive.
    """
    free = _storages([*module.parameters(), *module.buffers(), *pytree.tree_leaves(arguments)])
    # Held until the end: a storage freed in between could lend its address to another one.
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in free:
            storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = forward()
    returned = _storages(pytree.tree_leaves(kept)) if outputs_free else set()
    return sum(storage.nbytes() for address, storage in storages.items() if address not in returned)


def _storages(values: Iterable[Any]) -> set[int]:
    return {value.untyped_storage().data_ptr() for value in values if isinstance(value, Tensor)}
