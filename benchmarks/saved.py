"""How many bytes a forward keeps for its backward, measured the same way for eager and dispatched modules."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

__all__ = ["saved_for_backward"]


def saved_for_backward(module: nn.Module, forward: Callable[[], object], arguments: object = ()) -> int:
    """Bytes of the distinct storages that autograd saves during ``forward()``.

    Storages of parameters, buffers and ``arguments`` are free: they are alive anyway. The measure is
    ``torch.autograd.graph.saved_tensors_hooks``, so what escapes autograd is not seen. Each storage counts in full,
    also if only a view of it is saved, because in full is how it stays alive.
    """
    owned = [*module.parameters(), *module.buffers()]
    owned += [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]
    free = {tensor.untyped_storage().data_ptr() for tensor in owned}
    # Held until the end: a storage freed in between could lend its address to another one.
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in free:
            storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = forward()
    total = sum(storage.nbytes() for storage in storages.values())
    del kept
    return total
