"""Protected memory: what a run of forward may write and is not its own → its numbers are put back afterwards."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from bridge.base.errors import Unsupported, UnsupportedModule, user_line
from bridge.base.threads import stack_of
from bridge.base.torch_internals import storage_id
from bridge.capture.inplace_rules import CHANGES_ARGUMENT
from bridge.capture.rows import memory_of

__all__ = ["Protected"]


class Protected:
    """Memory that a run may write and that is not its own: put back afterwards.

    Args:
        parameters: the memory of parameters.
        others: further tensors.
        inner: arguments that are leaves in the run, and are none in the caller's graph: eager may write them.
    """

    def __init__(self, parameters: set[int], others: Sequence[torch.Tensor], inner: Sequence[torch.Tensor]):
        self._inner = {storage_id(each) for each in inner}
        self._memory = parameters | {storage_id(each) for each in others}
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def add(self, tensor: torch.Tensor) -> None:
        """A tensor from elsewhere is read."""
        if (memory := memory_of(tensor)) is not None:
            self._memory.add(memory)

    def note(self, tensor: torch.Tensor) -> None:
        """A tensor is about to be written. :class:`UnsupportedModule` for what only eager could write here."""
        memory = memory_of(tensor)
        if memory in self._inner and tensor.requires_grad and torch.is_grad_enabled():
            where = user_line(stack_of(threading.get_ident())) or "forward"
            hint = "work on a clone: x = x.clone() before it"
            raise UnsupportedModule("", [Unsupported("an argument", where, CHANGES_ARGUMENT, hint)])
        if memory in self._memory and memory not in self._before:
            storage = tensor.untyped_storage()
            self._before[memory] = storage, storage.clone()

    def restore(self) -> None:
        for storage, before in self._before.values():
            storage.copy_(before)
