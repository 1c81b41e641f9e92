"""Arguments of a run's own: argument tensors → leaves of the same numbers and layout, each in memory of its own.

A result that lies in the memory of an argument is a view of that very one. In the sample two arguments may share
memory, or one with a parameter, and in later calls need not: which of them a result belongs to is told by what is
made of them, which their memory tells only where it is not shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from bridge.base.torch_internals import has_storage, pytree, storage_id

__all__ = ["copier", "own_leaves", "with_attributes"]


def own_leaves(
    args: tuple, kwargs: dict[str, Any], owned: Iterable[torch.Tensor]
) -> tuple[tuple, dict[str, Any]]:
    """The arguments with new leaves for tensors; those that share memory with the module's, or with an earlier one,
    are copies."""
    taken = {storage_id(tensor) for tensor in owned if has_storage(tensor)}

    def own(tensor: torch.Tensor) -> torch.Tensor:
        leaf = tensor.detach()
        if has_storage(leaf):
            leaf = _copy(leaf) if leaf.numel() and storage_id(leaf) in taken else leaf
            taken.add(storage_id(leaf))
        return with_attributes(leaf.requires_grad_(tensor.requires_grad), tensor)

    return pytree.tree_map_only(torch.Tensor, own, (args, kwargs))


def copier() -> Callable[[torch.Tensor], torch.Tensor]:
    """Tensor → a copy of it; of tensors in one memory, copies in one memory."""
    memory: dict[int, Any] = {}

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage_id(tensor) not in memory:
            memory[storage_id(tensor)] = storage.clone()
        made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        made.set_(memory[storage_id(tensor)], tensor.storage_offset(), tensor.shape, tensor.stride())
        made = nn.Buffer(made, persistent=True) if type(tensor) is nn.Buffer else made
        made.requires_grad_(tensor.requires_grad)
        made.grad = tensor.grad if tensor.is_leaf else None
        return with_attributes(made, tensor)

    return copied


def with_attributes(made: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with the attributes that a user has set on another one."""
    made.__dict__.update((name, value) for name, value in tensor.__dict__.items() if not hasattr(made, name))
    return made


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage().clone()
    made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return made.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
