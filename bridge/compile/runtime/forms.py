"""Input forms: tensors given to a program → the same ones, dense; or a ``ValueError`` naming the one that differs."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch

from bridge.base.devices import HOST
from bridge.base.tensor_properties import TensorChecks, is_nested, tensor_checks
from bridge.compile.loop_ir.views import inverse
from bridge.compile.runtime.layout import Register

__all__ = ["InputForms", "Strided"]

_KIND, _DEVICE = attrgetter("shape", "dtype"), attrgetter("device")
#: Ways that fitting inputs may look: some require grad, or are parameters, or belong to inference mode, or are strided.
_MAX_LOOKS = 4

Strided = tuple[tuple[int, tuple[int, ...]], ...]
"""Places and strides of inputs that are not dense in the order of their slots."""


class InputForms:
    """Shapes, element types and the device of a program's inputs.

    Args:
        name: of the program.
        params: its parameters.
        device: where those are that do not lie on the host.
    """

    def __init__(self, name: str, params: Sequence[Register], device: torch.device):
        self._name, self._params = name, params
        self._kinds = [param.given_kind for param in params]
        self._devices = [HOST if param.lies_on_host else device for param in params]
        self._turned = [(place, param.order) for place, param in enumerate(params) if param.order is not None]
        self._looks: list[tuple[TensorChecks, Strided]] = []  # inputs that look like these fit

    def dense(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The inputs in the orders of their slots, those that lie otherwise as dense copies. Some may require grad:
        nothing is to record it.

        Raises:
            ValueError: their number, a shape, an element type or a device is another one.
        """
        found = None
        if not any(map(is_nested, inputs)):
            for alike, strided in self._looks:
                if alike.exact(*inputs) or alike.again(inputs):
                    found = strided
                    break
        if found is None:
            found = self._look(inputs)
        in_order = self._in_order(inputs) if self._turned else inputs
        return in_order if found == () else [tensor.contiguous() for tensor in in_order]

    def _in_order(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if not self._turned:
            return inputs
        turned = list(inputs)
        for place, order in self._turned:
            turned[place] = turned[place].permute(order)
        return turned

    def as_they_lie(self, inputs: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], Strided]:
        """The inputs, with the strides of those that lie otherwise than their slots have them; of too many kinds of
        strides, copies that lie so. Raises what :meth:`dense` does."""
        known = () if any(map(is_nested, inputs)) else self._looks
        strided = next((strided for alike, strided in known if alike(inputs)), None)
        strided = self._look(inputs) if strided is None else strided
        if strided is not None:
            return inputs, strided
        copies = [tensor.contiguous() for tensor in self._in_order(inputs)]
        for place, order in self._turned:
            copies[place] = copies[place].permute(inverse(order))
        return copies, ()

    def _look(self, inputs: Sequence[torch.Tensor]) -> Strided | None:
        """Which of inputs of a new look are strided; ``None``: some may be, in one of too many ways."""
        if list(map(_KIND, inputs)) != self._kinds or list(map(_DEVICE, inputs)) != self._devices:
            self._reject(inputs)
        in_order = self._in_order(inputs)
        strided = tuple(
            (place, inputs[place].stride()) for place, each in enumerate(in_order) if not each.is_contiguous()
        )
        if len(self._looks) < _MAX_LOOKS:
            self._looks.append((tensor_checks(inputs, given_twice=False), strided))
            return strided
        return None if strided else ()

    def _reject(self, inputs: Sequence[torch.Tensor]) -> None:
        if len(inputs) != len(self._kinds):
            raise ValueError(f"{self._name}: wanted {len(self._kinds)} inputs, got {len(inputs)}")
        for slot, (tensor, kind, device) in enumerate(zip(inputs, self._kinds, self._devices, strict=True)):
            if (_KIND(tensor), tensor.device) != (kind, device):
                raise ValueError(
                    f"{self._name}: input {slot} ({self._params[slot].name}) has shape {tuple(tensor.shape)} and"
                    f" {tensor.dtype} on {tensor.device}, wanted {tuple(kind[0])} and {kind[1]} on {device}"
                )
