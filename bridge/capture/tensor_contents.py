"""Tensor contents: tensors that forward may write behind a capture's back → a snapshot of their numbers, to put back.

Parameters, buffers and arguments are copied before real numbers are computed with them. A tensor that is an attribute,
a global or lies in a list is used as it is: what the runs of a capture that ends in a refusal write into it is undone.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from bridge.capture.overlap import overlaps_itself
from bridge.state import tensor_problem

__all__ = ["MAX_BYTES", "TensorContents"]

#: Tensors that take more than this, all smaller ones included, are not looked after: they are data, not state.
MAX_BYTES = 2**26


class TensorContents:
    """The numbers of tensors as they are now.

    Args:
        tensors: any; of several equal objects one counts.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]):
        plain = {id(each): each for each in tensors if tensor_problem(each) is None and not overlaps_itself(each)}
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []
        left = MAX_BYTES
        for tensor in sorted(plain.values(), key=lambda each: each.nbytes):
            left -= tensor.nbytes
            if left < 0:
                break
            self._before.append((tensor, tensor.detach().clone()))

    def restore(self) -> None:
        """Puts back what has changed; a batch norm changes running statistics without counting it."""
        for tensor, numbers in self._before:
            if not torch.equal(tensor.detach(), numbers):
                tensor.data.copy_(numbers)
