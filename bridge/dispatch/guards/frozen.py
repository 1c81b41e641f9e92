"""Conditions on frozen tensors: the module's tensors of a call → whether they are what was frozen, element by element.

An element that changes is seen by torch's counter of the tensor's changes: optimizers, ``load_state_dict`` and every
other change in place count, but for one: a batch norm writes its running statistics uncounted. Its layers in torch
count the batch beside them; where nothing does, the statistics themselves are compared. Not seen is what else torch
does not count: changes through ``.data``, NumPy or another process.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import attrgetter, is_
from typing import Any

import torch
from torch import fx, nn

from bridge.base.errors import MODULE, GuardFailure
from bridge.base.torch_internals import OpOverload
from bridge.capture import Captured

__all__ = ["FrozenTensors", "uncounted_statistics"]

_STATISTICS = {"running_mean", "running_var"}

_CHANGES = attrgetter("_version")
_ADDRESS = torch.Tensor.data_ptr


class FrozenTensors:
    """The tensors that one entry was frozen with, which it keeps alive.

    Args:
        tensors: the module's, in the order of the guard's inputs.
        names: how a failure calls each.
        uncounted: places of those that eager writes without counting it.

    Attributes:
        tensors: those.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], names: Sequence[str], uncounted: Collection[int] = ()):
        self.tensors, self._names = list(tensors), list(names)
        self._changes = list(map(_CHANGES, tensors))
        self._addresses = list(map(_ADDRESS, tensors))
        self._numbers = {place: tensors[place].detach().clone() for place in uncounted}

    @property
    def uncounted(self) -> list[int]:
        """The places that it was given."""
        return list(self._numbers)

    def renewed(self, tensors: Sequence[torch.Tensor]) -> FrozenTensors:
        """The conditions for other tensors of the same names, or the same ones as they are now."""
        return FrozenTensors(tensors, self._names, self._numbers)

    def holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these are the frozen ones, unchanged; as many as were frozen."""
        return (
            all(map(is_, tensors, self.tensors))
            and list(map(_CHANGES, tensors)) == self._changes
            and list(map(_ADDRESS, tensors)) == self._addresses
            and (not self._numbers or self._rewritten(tensors) is None)
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
        if (rewritten := self._rewritten(tensors)) is not None:
            return GuardFailure(MODULE, f"frozen {self._names[rewritten]}", "changed in place since it was frozen")
        return None

    def _rewritten(self, tensors: Sequence[torch.Tensor]) -> int | None:
        """The first place whose numbers are others without having been counted."""
        others = (place for place, then in self._numbers.items() if not torch.equal(tensors[place], then))
        return next(others, None)


def uncounted_statistics(module: nn.Module, captured: Captured) -> list[int]:
    """Places of the module's tensors that a batch norm has as running statistics and that no layer counts batches for.

    A layer of torch's own that tracks counts them in ``num_batches_tracked``, which is frozen beside.
    """
    found: set[int] = set()
    for node in captured.graph.nodes:
        if isinstance(node.target, OpOverload):
            names = (argument.name for argument in node.target._schema.arguments)
            given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
            values = (value for name, value in given.items() if name in _STATISTICS)
            found |= {captured.placeholders[value.name] for value in values if _is_placeholder(value)}
    tensors = [tensor for layer in module.modules() if _counts(layer) for tensor in layer.buffers(recurse=False)]
    names = dict((*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)))
    owned = {index: names.get(spec.name) for index, spec in enumerate(captured.module_tensors)}
    counted = {id(tensor) for tensor in tensors}
    return sorted(index for index in found if index in owned and id(owned[index]) not in counted)


def _is_placeholder(value: Any) -> bool:
    return isinstance(value, fx.Node) and value.op == "placeholder"


def _counts(layer: nn.Module) -> bool:
    """Whether the layer's forward is torch's own and counts its batches."""
    is_torchs = type(layer).__module__.startswith("torch.nn.modules.")
    return is_torchs and getattr(layer, "num_batches_tracked", None) is not None
