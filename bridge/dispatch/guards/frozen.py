"""Conditions on frozen tensors: the module's tensors of a call → whether they are what was frozen, element by element.

An element that changes is seen by torch's counter of the tensor's changes: optimizers, ``load_state_dict`` and every
other change in place count. Not seen is what torch does not count: changes through ``.data``, NumPy or another process.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, is_

import torch

from bridge.base.guard_failure import MODULE, GuardFailure

__all__ = ["FrozenTensors"]

_CHANGES = attrgetter("_version")
_ADDRESS = torch.Tensor.data_ptr


class FrozenTensors:
    """The tensors that one entry was frozen with, which it keeps alive.

    Args:
        tensors: the module's, in the order of the guard's inputs.
        names: how a failure calls each.

    Attributes:
        tensors: those.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], names: Sequence[str]):
        self.tensors, self._names = list(tensors), list(names)
        self._changes = list(map(_CHANGES, tensors))
        self._addresses = list(map(_ADDRESS, tensors))

    def renewed(self, tensors: Sequence[torch.Tensor]) -> FrozenTensors:
        """The conditions for other tensors of the same names, or the same ones as they are now."""
        return FrozenTensors(tensors, self._names)

    def holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these are the frozen ones, unchanged; as many as were frozen."""
        return (
            all(map(is_, tensors, self.tensors))
            and list(map(_CHANGES, tensors)) == self._changes
            and list(map(_ADDRESS, tensors)) == self._addresses
        )

    def failure(self, tensors: Sequence[torch.Tensor]) -> GuardFailure | None:
        """The first tensor that is another one or has changed; ``None`` if none is."""
        places = zip(tensors, self.tensors, self._names, self._changes, self._addresses, strict=True)
        for now, then, name, changes, address in places:
            if now is not then:
                return GuardFailure(MODULE, f"frozen {name}", "another tensor took its place since it was frozen")
            if _CHANGES(now) != changes:
                return GuardFailure(MODULE, f"frozen {name}", "changed in place since it was frozen")
            if _ADDRESS(now) != address:
                return GuardFailure(MODULE, f"frozen {name}", "moved in memory since it was frozen")
        return None
