"""Input forms: tensors given to a program → the same ones, dense; or a ``ValueError`` naming the one that differs."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch

from bridge.base.devices import HOST
from bridge.base.tensor_properties import Checks, is_nested, tensor_checks
from bridge.compile.runtime.layout import Register

__all__ = ["InputForms"]

_FORM = attrgetter("shape", "dtype", "device")
#: Ways that fitting inputs may look: some require grad, or are parameters, or belong to inference mode.
_MAX_FITTING = 4


class InputForms:
    """Shapes, element types and the device of a program's inputs.

    Args:
        name: of the program.
        params: its parameters.
        device: where those are that do not lie on the host.
    """

    def __init__(self, name: str, params: Sequence[Register], device: torch.device):
        self._name, self._params = name, params
        self._forms = [
            (torch.Size(param.shape), param.torch_dtype, HOST if param.lies_on_host else device) for param in params
        ]
        self._fitting: list[Checks] = []  # inputs that look like these fit, and are dense

    def dense(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The inputs, those that are strided as dense copies. Some may require grad: nothing is to record it.

        Raises:
            ValueError: their number, a shape, an element type or a device is another one.
        """
        if not any(map(is_nested, inputs)) and any(alike(inputs) for alike in self._fitting):
            return inputs
        if list(map(_FORM, inputs)) != self._forms:
            self._reject(inputs)
        if not all(map(torch.Tensor.is_contiguous, inputs)):
            return [tensor.contiguous() for tensor in inputs]
        if len(self._fitting) < _MAX_FITTING:
            self._fitting.append(tensor_checks(inputs, given_twice=False))
        return inputs

    def _reject(self, inputs: Sequence[torch.Tensor]) -> None:
        if len(inputs) != len(self._forms):
            raise ValueError(f"{self._name}: wanted {len(self._forms)} inputs, got {len(inputs)}")
        for slot, (tensor, form) in enumerate(zip(inputs, self._forms, strict=True)):
            if _FORM(tensor) != form:
                raise ValueError(
                    f"{self._name}: input {slot} ({self._params[slot].name}) has shape {tuple(tensor.shape)} and"
                    f" {tensor.dtype} on {tensor.device}, wanted {tuple(form[0])} and {form[1]} on {form[2]}"
                )
